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

from streamrl.errors import EngineError, WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, NcclState, NcclTicket, Offer, VersionRef
from streamrl.weights.document import NotAvailable, Superseded
from streamrl.weights.gpu.broadcast import GRACE_S, HEADER_BYTES, unpack_header
from streamrl.weights.gpu.communicator import (
    CommunicatorError,
    CommunicatorLibrary,
    CommunicatorStuck,
    GuardedCommunicator,
    Threads,
)
from streamrl.weights.gpu.cuda_memory import free_bytes
from streamrl.weights.gpu.device_document import DeviceDocument, check_device_bucket, empty_document
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, check_manifest, document_nbytes

log = logging.getLogger(__name__)

_LOOK_UP_S = 0.05
_RECOVER_S = 1.0
NUM_DOCUMENTS = 2
"""The one that serves, kept for a rollback, and the one that comes."""
MAX_ABANDONED = 1
"""Threads stuck in a library call before this process stops forming communicators."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data that a member needs to take a version."""

    manifest: Manifest  # digest_kind 1
    layout: Layout
    ticket: NcclTicket


@dataclass(frozen=True, slots=True)
class Received:
    """A version that came by broadcast, every bucket verified."""

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
        self, library: CommunicatorLibrary, device: str | torch.device, report: Callable[[NcclState], None],
        free: Callable[[torch.device], int | None] = free_bytes,
    ) -> None:
        self.threads = Threads()
        self._library, self._device, self._report = library, torch.device(device), report
        self._changed = threading.Condition()
        self._invitations: dict[VersionRef, Invitation] = {}
        self._outcome: dict[VersionRef, Received | WeightsError | EngineError] = {}
        self._guard: GuardedCommunicator | None = None
        self._epoch = 0  # of `_guard`, or of the last one that failed
        self._last: VersionRef | None = None  # received in this epoch
        self._closing = False
        self._free, self._no_room = free, ""
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
            if self._last is None and free is not None and free < NUM_DOCUMENTS * nbytes:
                self._give_up(f"{free >> 20} MiB of the GPU are free, {NUM_DOCUMENTS} documents of {nbytes >> 20} are "
                              "more")

    def _give_up(self, why: str) -> None:
        if not self._no_room:
            log.warning("no weights by nccl from now on, other transports bring them: %s", why)
            self._no_room = why
            self._changed.notify_all()

    def invite(self, manifest: Manifest, layout: Layout, ticket: NcclTicket) -> None:
        """Expect a version by this ticket's epoch; a newer epoch ends the present one. Idempotent."""
        with self._changed:
            known = self._invitations.get(manifest.ref)
            newest = max([self._epoch, *(invitation.ticket.epoch for invitation in self._invitations.values())])
            if ticket.epoch < newest or (known is not None and known.ticket.epoch == ticket.epoch):
                return
            delivered = self._last is not None and manifest.ref <= self._last
            if ticket.epoch == self._epoch and (self._guard is None or delivered):
                return  # that epoch failed here, or has delivered this version already
            if ticket.epoch > self._epoch and self._guard is not None:
                self._guard.stop()
            for ref in [r for r, i in self._invitations.items() if i.ticket.epoch < ticket.epoch]:
                self._settle(ref, NotAvailable(f"version {ref} was announced for an epoch that has ended"))
            if isinstance(self._outcome.get(manifest.ref), Exception):
                del self._outcome[manifest.ref]  # allow another attempt
            self._invitations[manifest.ref] = Invitation(manifest, layout, ticket)
            self._changed.notify_all()

    def uninvite(self, ref: VersionRef) -> None:
        """The hub has withdrawn its invitation: the epoch of this version has failed."""
        with self._changed:
            if ref in self._invitations:
                if self._guard is not None and self._invitations[ref].ticket.epoch == self._epoch:
                    self._guard.stop()
                self._settle(ref, NotAvailable(f"the broadcast of version {ref} was canceled"))

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
                outcome = self._outcome.get(ref)
                if isinstance(outcome, Received) and time.monotonic() < deadline:
                    return outcome
                if isinstance(outcome, Exception):
                    raise outcome
                if ref not in self._invitations and outcome is None:
                    raise NotAvailable(f"no broadcast of version {ref} is expected")
                if time.monotonic() >= deadline:
                    raise NotAvailable(f"the broadcast of version {ref} was not complete in time")
                self._changed.wait(min(_LOOK_UP_S, max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        """Leave the epoch; may be called twice."""
        with self._changed:
            self._closing = True
            if self._guard is not None:
                self._guard.stop()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    # --- the member's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (invitation := self._next()) is not None:
            try:
                if invitation.ticket.epoch != self._epoch:
                    self._form(invitation.ticket)
                else:
                    self._receive(invitation)
            except CommunicatorStuck as error:
                self._over(error)
            except torch.OutOfMemoryError as error:
                with self._changed:
                    self._give_up(str(error))
                self._over(NotAvailable(self._no_room))
            except Exception as error:  # a library may raise anything; the other ranks must not wait for this one
                ours = error if isinstance(error, WeightsError) else WeightsError(f"a broadcast failed: {error!r}")
                log.warning("epoch %d failed on this rank: %s", invitation.ticket.epoch, error)
                self._over(ours)
        if self._guard is not None:
            self._leave()

    def _next(self) -> Invitation | None:
        """The oldest invitation of the newest epoch; None once closed."""
        with self._changed:
            while not self._closing:
                if (self._guard is not None and self._guard.stopped) or (self._no_room and not self._state.broken):
                    break
                if self._invitations:
                    return self._invitations[min(self._invitations)]
                self._changed.wait(_RECOVER_S if self._state.broken else None)
                if self._state.broken and not self.broken:
                    break
            if self._closing:
                return None
            recovered = self._guard is None and not self._no_room
        if recovered:
            self._say(broken=False)  # the stuck thread has returned
            return self._next()
        self._over(NotAvailable(self._no_room or f"epoch {self._epoch} was ended"))
        return self._next()

    def _form(self, ticket: NcclTicket) -> None:
        self._leave()
        with self._changed:
            self._epoch, self._last = ticket.epoch, None
            if self.broken:
                raise CommunicatorError(self._no_room or "a thread of this process is stuck in an earlier epoch")
            guard = self._guard = GuardedCommunicator(
                self._library, self.threads, rank=ticket.rank, world=ticket.world, unique_id=ticket.unique_id,
                what=f"epoch {ticket.epoch} as rank {ticket.rank}",
            )
        self._say(joining=ticket.epoch)
        # Longer than the hub waits: the hub then ends the broadcaster, which releases the other ranks from their calls.
        guard.form(ticket.init_deadline_s + GRACE_S)
        log.info("epoch %d: rank %d of %d is formed", ticket.epoch, ticket.rank, ticket.world)
        self._say(formed=ticket.epoch, joining=0)

    def _receive(self, invitation: Invitation) -> None:
        guard, ticket = self._guard, invitation.ticket
        assert guard is not None
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        guard.broadcast(header, ticket.init_deadline_s + ticket.bucket_deadline_s + GRACE_S)
        started = time.monotonic()
        ref = unpack_header(header)
        invitation = self._invitation_of(ref, started + ticket.bucket_deadline_s)
        check_manifest(invitation.manifest, invitation.layout, DIGEST_FOLD128)
        body = empty_document(document_nbytes(invitation.layout), self._device)
        verify_s, failure = 0.0, None
        for index, (start, end) in enumerate(bucket_ranges(invitation.layout)):
            guard.broadcast(body[start:end], ticket.bucket_deadline_s)
            moved = time.monotonic()
            try:
                check_device_bucket(index, body[start:end], invitation.manifest)
            except WeightsError as error:
                failure = failure or error  # continue to the end: the other members' bytes may be intact
            verify_s += time.monotonic() - moved
        if failure is not None:
            with self._changed:
                self._settle(ref, failure)
            raise failure
        with self._changed:
            self._last = ref
            for older in [r for r in self._invitations if r < ref]:
                self._settle(older, NotAvailable(f"version {older} was skipped for {ref}"))
            self._settle(ref, Received(body, time.monotonic() - started - verify_s, verify_s))

    def _invitation_of(self, ref: VersionRef, deadline: float) -> Invitation:
        """The invitation of the version in the header; it travels apart from the broadcast and may arrive later."""
        with self._changed:
            while ref not in self._invitations:
                if time.monotonic() >= deadline or self._closing:
                    raise CommunicatorError(f"version {ref} was broadcast without an announcement")
                self._changed.wait(_LOOK_UP_S)
            return self._invitations[ref]

    def _over(self, error: WeightsError | EngineError) -> None:
        """The present epoch has failed: report it, and fail every wait on it."""
        try:
            self._leave()
        except CommunicatorStuck as stuck:
            error = stuck
        with self._changed:
            for ref, invitation in list(self._invitations.items()):
                if invitation.ticket.epoch <= self._epoch:
                    self._settle(ref, error)
        self._say(failed=self._epoch, joining=0, formed=0, broken=self.broken)

    def _say(self, **changes: int) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._report(self._state)

    def _leave(self) -> None:
        with self._changed:
            guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def _settle(self, ref: VersionRef, outcome: Received | WeightsError | EngineError) -> None:
        self._invitations.pop(ref, None)
        for other, was in list(self._outcome.items()):  # keep one body; older errors are obsolete
            if isinstance(outcome, Received) or (other < ref and not isinstance(was, Received)):
                del self._outcome[other]
        self._outcome[ref] = outcome
        self._changed.notify_all()


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
