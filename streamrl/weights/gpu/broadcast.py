"""Weights by broadcast: rank 0, and the receiving ranks.

A broadcast of a version is a header (which version this is), its buckets in layout order, and an all-reduce: once that
is done, every rank has every bucket, and the communicator may be left. It brings one version after another.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, NcclState, NcclTicket, Offer, VersionRef
from streamrl.weights.document import NotAvailable
from streamrl.weights.gpu.cuda_memory import free_bytes
from streamrl.weights.gpu.device_document import DeviceDocument, HostBuckets, check_device_bucket, empty_document
from streamrl.weights.gpu.nccl import CommunicatorError, CommunicatorStuck, CupyNccl, GuardedCommunicator, Threads
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, check_manifest, document_nbytes
from streamrl.weights.transport import POLL_S

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"SRLB"
HEADER_BYTES = _HEADER.size
GRACE_S = 5.0
"""How much longer than the hub a rank waits for the other ranks."""


class Broadcaster:
    """Rank 0 of one epoch at a time. Call its methods from one thread, `stop` from any."""

    def __init__(self, library: CupyNccl, device: str | torch.device) -> None:
        self.threads = Threads()
        self._library, self._device = library, torch.device(device)
        self._guard: GuardedCommunicator | None = None
        self._slots: list[torch.Tensor] = []
        self._filler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fill")

    def name(self) -> bytes:
        """A unique id for the next epoch."""
        return self._library.unique_id()

    def form(self, epoch: int, world: int, unique_id: bytes, deadline_s: float) -> None:
        """Raises CommunicatorError or CommunicatorStuck."""
        self.close()
        self._guard = GuardedCommunicator(
            self._library, self.threads, rank=0, world=world, unique_id=unique_id, what=f"epoch {epoch} as rank 0"
        )
        self._guard.form(deadline_s)

    def send(
        self, ref: VersionRef, source: HostBuckets, *, deadline_s: float, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Broadcast a version; while one bucket travels the next is fetched.

        Args:
            deadline_s: for each bucket.
            progress: called after each.
        Raises:
            CommunicatorError, CommunicatorStuck: the epoch is dead.
        """
        guard = self._guard
        if guard is None:
            raise CommunicatorError("send() before form(): there is no communicator")
        ranges = bucket_ranges(source.layout)
        slots = self._two_slots(max(source.layout.bucket_bytes))
        # Members learn from the header which of the versions they were invited to comes.
        guard.broadcast(pack_header(ref, self._device), deadline_s)
        # One bucket is read while the one before travels; a third buffer would only cost memory.
        filling = self._filler.submit(source.fill, 0, slots[0])
        for index, (start, end) in enumerate(ranges):
            filling.result()
            if index + 1 < len(ranges):
                filling = self._filler.submit(source.fill, index + 1, slots[(index + 1) % 2])
            guard.broadcast(slots[index % 2][: end - start], deadline_s)
            progress()
        guard.test(deadline_s)  # no rank has left before all have everything

    def stop(self) -> None:
        """End what is in progress, from another thread."""
        if (guard := self._guard) is not None:
            guard.stop()

    def close(self) -> None:
        """Leave the present epoch."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def _two_slots(self, nbytes: int) -> list[torch.Tensor]:
        if not self._slots or self._slots[0].numel() < nbytes:
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return self._slots


def pack_header(ref: VersionRef, device: torch.device) -> torch.Tensor:
    raw = bytearray(_HEADER.pack(_MAGIC, ref.learner_epoch, ref.version))
    return torch.frombuffer(raw, dtype=torch.uint8).to(device)


def unpack_header(header: torch.Tensor) -> VersionRef:
    magic, learner_epoch, version = _HEADER.unpack(header.cpu().numpy().tobytes())
    if magic != _MAGIC:
        raise WeightsError(f"a broadcast begins with {_MAGIC!r}, this one with {magic!r}")
    return VersionRef(learner_epoch, version)


# --- a member ---------------------------------------------------------------------------------------------------------

_RECOVER_S = 1.0
NUM_DOCUMENTS = 2
"""The one that serves, kept for a rollback, and the one that comes."""
MAX_ABANDONED = 1
"""Threads stuck in a library call before this process stops forming communicators."""


class Expected:
    """A version that an epoch is to bring to a member, and how that ended once `over` is set."""

    def __init__(self, manifest: Manifest, layout: Layout, ticket: NcclTicket) -> None:
        self.manifest, self.layout, self.ticket = manifest, layout, ticket
        self.over = threading.Event()
        self.error: Exception | None = None
        self.body: torch.Tensor | None = None  # every bucket verified, in so many seconds
        self.num_buckets, self.verify_s = 0, 0.0

    @property
    def key(self) -> tuple[int, VersionRef]:
        """Epoch and version: what a repeated invitation is known by, and the order of all invitations."""
        return self.ticket.epoch, self.manifest.ref

    def end(self, error: Exception | None) -> None:
        """End it, unless it has ended before."""
        if not self.over.is_set():
            self.error = error
            self.over.set()


class BroadcastMember:
    """An actor's end. Every method may be called from any thread.

    A member takes part in every broadcast that it was invited to, wanted by its installer or not: a collective call
    that one rank leaves out hangs all the others. So it has a thread of its own, which the installer asks for the
    result.

    Args:
        report: told where this member is, whenever that changes, from the member's thread.
        free: memory of the device that is left; None where nothing limits it.
    """

    def __init__(
        self, library: CupyNccl, device: str | torch.device, report: Callable[[NcclState], None],
        free: Callable[[torch.device], int | None] = free_bytes,
    ) -> None:
        self.threads = Threads()
        self._library, self._device, self._report, self._free = library, torch.device(device), report, free
        self._changed = threading.Condition()  # guards all that follows
        self._newest: Expected | None = None
        self._received: Expected | None = None  # kept for the installer until another has come
        self._guard: GuardedCommunicator | None = None  # of the newest epoch, or of an older one that is being left
        self._no_room = ""
        self._closing = False
        self._epoch = 0  # the newest that this process has formed, or tried to
        self._state = NcclState()
        self._thread = threading.Thread(target=self._run, name="broadcasts", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> bool:
        """A thread is stuck in the library, or documents do not fit into the device: nothing more is formed here."""
        return bool(self._no_room) or self.threads.num_abandoned >= MAX_ABANDONED

    def expect(self, nbytes: int) -> None:
        """Documents are of this size: without room for them this member leaves the broadcasts, for good.

        It leaves before it is invited: one member that runs out of memory ends the epoch of all.
        """
        free = self._free(self._device)
        with self._changed:
            if self._received is None and free is not None and free < NUM_DOCUMENTS * nbytes:
                self._give_up(f"{free >> 20} MiB of the GPU are free, {NUM_DOCUMENTS} documents of {nbytes >> 20} are "
                              "more")

    def invite(self, manifest: Manifest, layout: Layout, ticket: NcclTicket) -> Expected | None:
        """Expect a version by this ticket's epoch; a newer epoch ends the present one. None for an epoch of the past.

        Idempotent: the announcement and the installer both come here.
        """
        with self._changed:
            expected = Expected(manifest, layout, ticket)
            for known in (self._newest, self._received):
                if known is not None and known.key == expected.key:
                    return known
            if self._newest is not None:
                if expected.key < self._newest.key:
                    return None
                # The hub invites to a version of the same epoch only when the one before has come everywhere.
                if ticket.epoch > self._newest.ticket.epoch:
                    self._end(NotAvailable("it was announced for an epoch that has ended"))
            self._newest = expected
            if self._closing:
                expected.end(NotAvailable("this process ends"))
            self._changed.notify_all()
            return expected

    def uninvite(self, ref: VersionRef) -> None:
        """The hub has withdrawn its invitation: the epoch that was to bring this version has failed."""
        with self._changed:
            if self._newest is not None and self._newest.manifest.ref == ref:
                self._end(NotAvailable(f"the broadcast of version {ref} was canceled"))

    def close(self) -> None:
        """Leave the communicator; may be called twice."""
        with self._changed:
            self._closing = True
            self._end(NotAvailable("this process ends"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    # --- with `_changed` held -----------------------------------------------------------------------------------

    def _end(self, error: Exception) -> None:
        """Let nobody wait for the version any longer; the thread leaves the communicator."""
        if self._newest is not None and not self._newest.over.is_set():
            self._newest.end(error)
            if self._guard is not None:
                self._guard.stop()
        self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        if not self._no_room:
            log.warning("no weights by nccl from now on, other transports bring them: %s", why)
            self._no_room = why
            self._changed.notify_all()

    # --- the member's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        done: Expected | None = None
        while (expected := self._next_expected(done)) is not None:
            error, done = self._take_part(expected), expected
            epoch = expected.ticket.epoch
            if error is not None and not isinstance(error, NotAvailable):
                log.warning("epoch %d failed on this rank: %s", epoch, error)
            with self._changed:
                if error is None and not expected.over.is_set():
                    self._received = expected
                expected.end(error)
            if error is not None and not self._closing:
                self._say(failed=epoch, joining=0, formed=0, broken=self.broken)
        with contextlib.suppress(CommunicatorStuck):  # the process ends
            self._leave()

    def _next_expected(self, done: Expected | None) -> Expected | None:
        """Wait for an invitation to another version, and report meanwhile what changes; None once closed."""
        while True:
            with self._changed:
                # A thread that was stuck and returns sends no notification.
                self._changed.wait_for(
                    lambda: self._closing or self._newest is not done or self.broken != self._state.broken,
                    _RECOVER_S if self._state.broken else None,
                )
                if self._closing:
                    return None
                expected = self._newest
            if self.broken != self._state.broken:
                self._say(broken=self.broken)
            if expected is not done:
                return expected

    def _take_part(self, expected: Expected) -> Exception | None:
        """Bring a version; what went wrong, after which the communicator is left."""
        try:
            self._receive(self._communicator(expected), expected)
            return None
        except torch.OutOfMemoryError as out_of_memory:
            with self._changed:
                self._give_up(str(out_of_memory))
            error: Exception = NotAvailable(self._no_room)
        except (WeightsError, CommunicatorStuck) as known:
            error = known
        except Exception as unknown:  # a library may raise anything; the other ranks must not wait for this one
            error = WeightsError(f"a broadcast failed: {unknown!r}")
        try:
            self._leave()
        except CommunicatorStuck as stuck:
            error = stuck
        return error

    def _leave(self) -> None:
        with self._changed:
            guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def _communicator(self, expected: Expected) -> GuardedCommunicator:
        """The communicator of a version's epoch, formed for the first version that comes by it."""
        ticket = expected.ticket
        what = f"epoch {ticket.epoch} as rank {ticket.rank}"
        if ticket.epoch == self._epoch:
            if self._guard is None:
                raise NotAvailable(f"{what} is over: it failed here before")
            return self._guard
        # Only now: while other members may still receive the last version, none may leave its communicator.
        self._leave()
        with self._changed:
            if self.broken:
                raise CommunicatorError(self._no_room or "a thread of this process is stuck in an earlier epoch")
            if expected.over.is_set():
                raise NotAvailable(f"{what} is over")
            self._epoch = ticket.epoch
            guard = self._guard = GuardedCommunicator(
                self._library, self.threads, rank=ticket.rank, world=ticket.world, unique_id=ticket.unique_id, what=what
            )
        self._say(joining=ticket.epoch)
        # Longer than the hub waits: the hub then ends the broadcaster, which releases the other ranks from their calls.
        guard.form(ticket.init_deadline_s + GRACE_S)
        log.info("epoch %d: rank %d of %d is formed", ticket.epoch, ticket.rank, ticket.world)
        self._say(formed=ticket.epoch, joining=0)
        return guard

    def _receive(self, guard: GuardedCommunicator, expected: Expected) -> None:
        ticket, layout, manifest = expected.ticket, expected.layout, expected.manifest
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        guard.broadcast(header, ticket.init_deadline_s + ticket.bucket_deadline_s + GRACE_S)
        if (ref := unpack_header(header)) != manifest.ref:
            raise WeightsError(f"version {ref} was broadcast, {manifest.ref} was announced for it")
        check_manifest(manifest, layout, DIGEST_FOLD128)
        body, failure = empty_document(document_nbytes(layout), self._device), None
        for index, (start, end) in enumerate(bucket_ranges(layout)):
            guard.broadcast(body[start:end], ticket.bucket_deadline_s)
            moved = time.monotonic()
            try:
                check_device_bucket(index, body[start:end], manifest)
            except WeightsError as error:
                failure = failure or error  # continue to the end: the other members' bytes may be intact
            expected.num_buckets, expected.verify_s = index + 1, expected.verify_s + time.monotonic() - moved
        guard.test(ticket.bucket_deadline_s)
        if failure is not None:
            raise failure
        expected.body = body

    def _say(self, **changes: int) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._report(self._state)


class BroadcastReceiver:
    """Receives one document by `nccl`; see `streamrl.weights.transport.Receiver`."""

    source = InstallSource.NCCL

    def __init__(self, offer: Offer, member: BroadcastMember) -> None:
        self._offer, self._member = offer, member

    def receive(self, manifest: Manifest, layout: Layout) -> Generator[int, None, DeviceDocument]:
        """Wait for the member's thread; the broadcast itself goes on when nobody waits for it any more.

        Raises:
            NotAvailable: no broadcast is expected, or it ended. WeightsError: it arrived damaged.
            CommunicatorStuck: this process must end.
        """
        device_manifest, ticket = self._offer.manifest, self._offer.nccl
        if device_manifest is None or ticket is None:
            raise NotAvailable("the offer names no digests or no epoch for a broadcast")
        check_manifest(device_manifest, layout, DIGEST_FOLD128)
        expected = self._member.invite(device_manifest, layout, ticket)
        if expected is None:
            raise NotAvailable(f"no broadcast of version {manifest.ref} is expected: its epoch has ended")
        while not expected.over.wait(POLL_S):
            yield expected.num_buckets
        if expected.error is not None:
            raise expected.error
        return DeviceDocument(expected.body, manifest, device_manifest, layout, verify_s=expected.verify_s)
