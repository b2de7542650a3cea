"""Weights by broadcast: the receiving ranks.

A member takes part in every broadcast that it was invited to, wanted by its installer or not: a collective call that
one rank leaves out hangs all the others. So it has a thread of its own, which the installer asks for the result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, NcclState, NcclTicket, Offer, VersionRef
from streamrl.weights.document import NotAvailable, Superseded
from streamrl.weights.gpu.broadcast import GRACE_S, HEADER_BYTES, unpack_header
from streamrl.weights.gpu.communicator import CommunicatorError, CommunicatorStuck, GuardedCommunicator, Threads
from streamrl.weights.gpu.cuda_memory import free_bytes
from streamrl.weights.gpu.device_document import DeviceDocument, check_device_bucket, empty_document
from streamrl.weights.gpu.nccl import CupyNccl
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, check_manifest, document_nbytes

log = logging.getLogger(__name__)

_LOOK_UP_S = 0.05
_RECOVER_S = 1.0
NUM_DOCUMENTS = 2
"""The one that serves, kept for a rollback, and the one that comes."""
MAX_ABANDONED = 1
"""Threads stuck in a library call before this process stops forming communicators."""


@dataclass(frozen=True, slots=True)
class Received:
    """A version that came by broadcast, every bucket verified."""

    ref: VersionRef
    body: torch.Tensor
    transfer_s: float
    verify_s: float


class BroadcastMember:
    """An actor's end. Every method may be called from any thread.

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
        self._epoch = 0  # the newest that this member was invited to
        self._ticket: NcclTicket | None = None  # its place there, until that epoch has failed
        self._guard: GuardedCommunicator | None = None  # of this epoch, or of an older one that is being ended
        self._invited: dict[VersionRef, tuple[Manifest, Layout]] = {}  # to come by the newest epoch
        self._received: Received | None = None  # the newest; kept for the installer until another has come
        self._failed: dict[VersionRef, Exception] = {}  # why versions did not come
        self._no_room = ""
        self._closing = False
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

    def invite(self, manifest: Manifest, layout: Layout, ticket: NcclTicket) -> None:
        """Expect a version by this ticket's epoch; a newer epoch ends the present one. Idempotent."""
        ref = manifest.ref
        with self._changed:
            if ticket.epoch > self._epoch:
                self._end_epoch(NotAvailable("it was announced for an epoch that has ended"))
                self._epoch, self._ticket = ticket.epoch, ticket
            elif ticket.epoch < self._epoch or self._ticket is None:
                return  # an old one, or it has failed here
            elif ref in self._invited or (self._received is not None and ref <= self._received.ref):
                return
            self._failed.pop(ref, None)
            self._invited[ref] = manifest, layout
            self._changed.notify_all()

    def uninvite(self, ref: VersionRef) -> None:
        """The hub has withdrawn its invitation: the epoch of this version has failed."""
        with self._changed:
            if ref in self._invited:
                self._end_epoch(NotAvailable(f"the broadcast of version {ref} was canceled"))

    def wait_for(self, ref: VersionRef, *, cancelled: threading.Event, deadline: float) -> Received:
        """The received version; kept until a newer one has arrived.

        Raises:
            Superseded: `cancelled` was set; the broadcast itself continues.
            NotAvailable: no broadcast is expected, or it is late. WeightsError: it arrived damaged.
            CommunicatorStuck: this process must end.
        """
        with self._changed:
            while True:
                if cancelled.is_set():
                    raise Superseded(f"version {ref}: abandoned for a newer version")
                if ref in self._failed:
                    raise self._failed[ref]
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise NotAvailable(f"the broadcast of version {ref} was not complete in time")
                if self._received is not None and self._received.ref == ref:
                    return self._received
                if ref not in self._invited:
                    raise NotAvailable(f"no broadcast of version {ref} is expected")
                self._changed.wait(min(_LOOK_UP_S, left_s))

    def close(self) -> None:
        """Leave the epoch; may be called twice."""
        with self._changed:
            self._closing = True
            self._end_epoch(NotAvailable("this process ends"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    # --- with `_changed` held -----------------------------------------------------------------------------------

    def _end_epoch(self, error: Exception) -> None:
        """Let no version of this epoch be waited for any longer; its thread leaves the communicator."""
        self._ticket = None
        if self._guard is not None:
            self._guard.stop()
        self._failed = dict.fromkeys(self._invited, error)
        self._invited.clear()
        self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        if not self._no_room:
            log.warning("no weights by nccl from now on, other transports bring them: %s", why)
            self._no_room = why
            self._changed.notify_all()

    # --- the member's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (ticket := self._next_epoch()) is not None:
            try:
                self._serve(ticket)
            except torch.OutOfMemoryError as error:
                with self._changed:
                    self._give_up(str(error))
                self._leave(ticket, NotAvailable(self._no_room))
            except (WeightsError, CommunicatorStuck) as error:
                self._leave(ticket, error)
            except Exception as error:  # a library may raise anything; the other ranks must not wait for this one
                self._leave(ticket, WeightsError(f"a broadcast failed: {error!r}"))

    def _next_epoch(self) -> NcclTicket | None:
        """Wait for an invitation to another epoch, and report meanwhile what changes; None once closed."""
        while True:
            with self._changed:
                # A thread that was stuck and returns sends no notification.
                self._changed.wait_for(
                    lambda: self._closing or self._ticket is not None or self.broken != self._state.broken,
                    _RECOVER_S if self._state.broken else None,
                )
                if self._closing:
                    return None
                ticket = self._ticket
            if self.broken != self._state.broken:
                self._say(broken=self.broken)
            if ticket is not None:
                return ticket

    def _serve(self, ticket: NcclTicket) -> None:
        """Take part in every broadcast of an epoch until it ends, which is always by an exception."""
        guard = self._form(ticket)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._invited or guard.stopped or self._no_room)
                if guard.stopped or self._no_room:
                    raise NotAvailable(self._no_room or f"epoch {ticket.epoch} was ended")
            self._receive(guard, ticket)

    def _form(self, ticket: NcclTicket) -> GuardedCommunicator:
        what = f"epoch {ticket.epoch} as rank {ticket.rank}"
        with self._changed:
            if self.broken:
                raise CommunicatorError(self._no_room or "a thread of this process is stuck in an earlier epoch")
            if self._ticket is not ticket:
                raise CommunicatorError(f"{what} is over")
            guard = self._guard = GuardedCommunicator(
                self._library, self.threads, rank=ticket.rank, world=ticket.world, unique_id=ticket.unique_id, what=what
            )
        self._say(joining=ticket.epoch)
        # Longer than the hub waits: the hub then ends the broadcaster, which releases the other ranks from their calls.
        guard.form(ticket.init_deadline_s + GRACE_S)
        log.info("epoch %d: rank %d of %d is formed", ticket.epoch, ticket.rank, ticket.world)
        self._say(formed=ticket.epoch, joining=0)
        return guard

    def _receive(self, guard: GuardedCommunicator, ticket: NcclTicket) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        guard.broadcast(header, ticket.init_deadline_s + ticket.bucket_deadline_s + GRACE_S)
        started = time.monotonic()
        ref = unpack_header(header)
        manifest, layout = self._invitation_of(ref, ticket.bucket_deadline_s)
        check_manifest(manifest, layout, DIGEST_FOLD128)
        body = empty_document(document_nbytes(layout), self._device)
        verify_s, failure = 0.0, None
        for index, (start, end) in enumerate(bucket_ranges(layout)):
            guard.broadcast(body[start:end], ticket.bucket_deadline_s)
            moved = time.monotonic()
            try:
                check_device_bucket(index, body[start:end], manifest)
            except WeightsError as error:
                failure = failure or error  # continue to the end: the other members' bytes may be intact
            verify_s += time.monotonic() - moved
        if failure is not None:
            raise failure
        with self._changed:
            self._received, self._failed = Received(ref, body, time.monotonic() - started - verify_s, verify_s), {}
            for older in [one for one in self._invited if one <= ref]:
                del self._invited[older]
            self._changed.notify_all()

    def _invitation_of(self, ref: VersionRef, deadline_s: float) -> tuple[Manifest, Layout]:
        """The invitation of the version in the header; it travels apart from the broadcast and may arrive later."""
        with self._changed:
            if not self._changed.wait_for(lambda: ref in self._invited or self._ticket is None, deadline_s):
                raise CommunicatorError(f"version {ref} was broadcast without an announcement")
            if ref not in self._invited:
                raise CommunicatorError(f"the epoch of version {ref} was ended")
            return self._invited[ref]

    def _leave(self, ticket: NcclTicket, error: Exception) -> None:
        """An epoch is over: leave its communicator, fail every wait on it, and report it."""
        if not isinstance(error, NotAvailable):
            log.warning("epoch %d failed on this rank: %s", ticket.epoch, error)
        with self._changed:
            guard, self._guard = self._guard, None
        try:
            if guard is not None:
                guard.close()
        except CommunicatorStuck as stuck:
            error = stuck
        with self._changed:
            if self._ticket is ticket:  # not yet ended for a newer one
                self._end_epoch(error)
        if not self._closing:
            self._say(failed=ticket.epoch, joining=0, formed=0, broken=self.broken)

    def _say(self, **changes: int) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._report(self._state)


class BroadcastReceiver:
    """Receives one document by `nccl`; see `streamrl.weights.source.Receiver`."""

    source = InstallSource.NCCL

    def __init__(self, offer: Offer, member: BroadcastMember) -> None:
        self._offer, self._member = offer, member

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> tuple[DeviceDocument, float, float]:
        """(verified document in device memory, transfer_s, verify_s). Raises as `BroadcastMember.wait_for`."""
        device_manifest, ticket = self._offer.manifest, self._offer.nccl
        if device_manifest is None or ticket is None:
            raise NotAvailable("the offer names no digests or no epoch for a broadcast")
        check_manifest(device_manifest, layout, DIGEST_FOLD128)
        self._member.invite(device_manifest, layout, ticket)
        came = self._member.wait_for(manifest.ref, cancelled=cancelled, deadline=deadline)
        document = DeviceDocument(came.body, manifest, device_manifest, layout)
        return document, came.transfer_s, came.verify_s
