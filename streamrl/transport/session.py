"""The actor's side of the protocol as a pure state machine: inputs and `now` in, effects out. No socket, no clock.

    CONNECTING    HELLO sent, repeated with back-off                         -> WELCOME -> SYNCING
    SYNCING       linked, first version not installed; outbox is re-sent     -> first install -> RUNNING
    RUNNING       leases, groups and installs flow     -> no message for hub_silent_s -> DISCONNECTED; drain -> DRAINING
    DISCONNECTED  held leases go on, none are taken; HELLO with back-off     -> WELCOME -> SYNCING or RUNNING
    DRAINING      leases are finished or handed back, none are taken         -> outbox settled -> LEAVING
    LEAVING       BYE sent                                                   -> BYE or time-out -> CLOSED
    CLOSED        nothing more is sent
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

import msgspec

from streamrl.errors import WireError
from streamrl.messages import (
    NUM_FAILED_EPISODES,
    PROTOCOL,
    Ack,
    ActorHeartbeat,
    ActorState,
    Bye,
    Drain,
    Group,
    Hello,
    Installed,
    LeaseRef,
    Limits,
    Message,
    NcclState,
    Outcome,
    RejectReason,
    ReturnReason,
    Stop,
    StopReason,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import check_form, check_size, encode
from streamrl.transport.outbox import Entry, Outbox

log = logging.getLogger("streamrl.actor")

MAX_UNSETTLED = 64
"""Groups sent and not yet accepted or rejected; the rest waits in the outbox."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 5.0
EXIT_FENCED, EXIT_EVICTED = 3, 7
MAX_EVICTIONS, EVICTIONS_S = 3, 3600.0
"""An actor that is evicted so often in an hour, and of whose work nothing is kept meanwhile, ends."""


@dataclass(frozen=True, slots=True)
class Send:
    """A frame for the socket."""

    frame: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Deliver:
    """An event for the worker: Welcome, Leases, Announce, HubHeartbeat, Drain, Stop, or `Disconnected`."""

    event: Message | Disconnected


@dataclass(frozen=True, slots=True)
class Disconnected:
    """No message of the hub came for hub_silent_s."""


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The session is over: close the socket and exit with this status."""

    exit_code: int
    detail: str


Effect = Send | Deliver | LinkClosed


@dataclass(slots=True)
class Progress:
    """The worker's part of the next heartbeat; the worker keeps it up to date."""

    max_leases: int = 0
    free: int = 0
    free_eval: int = 0
    running: int = 0
    tokens_total: int = 0
    held: tuple[LeaseRef, ...] = ()
    stuck: tuple[LeaseRef, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)


class ActorSession:
    """The protocol state of one incarnation of one actor."""

    def __init__(
        self, actor_id: str, incarnation: int, *, engine: str, max_leases: int, transports: tuple[str, ...],
        software: str, random_seed: int = 0, give_up_after_s: float = 0.0, device: str = "",
    ) -> None:
        self.actor_id, self.incarnation, self.device = actor_id, incarnation, device
        self.engine, self.max_leases, self.transports, self.software = engine, max_leases, transports, software
        self.nccl: NcclState | None = None
        self.state = ActorState.CONNECTING
        self.limits = Limits()
        self.outbox = Outbox(self.limits.outbox_groups, self.limits.outbox_bytes)
        self.run_id: str | None = None
        self.learner_epoch = 0
        self.installed: tuple[VersionRef, bytes] | None = None
        self.progress = Progress()
        self.turn = 0  # of the learner, for which the engine gave its memory back
        self._evicted_at: list[float] = []
        self._give_up_after_s = give_up_after_s
        self._rng = random.Random(random_seed)
        self._num_retries = 0
        self._beat = 0
        self._disconnected_at = self._heard_at = self._beat_at = self._hello_at = self._bye_at = 0.0
        self._num_byes = 0
        self._jitter = 1.0
        self._drain_until: float | None = None

    # --- inputs ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        self._heard_at = self._disconnected_at = now
        return self._hello(now)

    def received(self, message: Message, now: float) -> list[Effect]:
        """A decoded message of the hub."""
        self._heard_at = now
        match message:
            case Welcome():
                return self._welcomed(message, now)
            case Ack():
                return self._acked(message, now)
            case Stop():
                return self._stopped(message, now)
            case Bye():
                return self._close(0, "left cleanly")
            case _:  # what the session does not need itself is the worker's
                return [Deliver(message)] if self.linked else []

    def connected(self, now: float) -> list[Effect]:
        """A connection was made: HELLO at once, where its time has not come yet."""
        if self.state not in (ActorState.CONNECTING, ActorState.DISCONNECTED):
            return []
        self._num_retries = 0
        return self._hello(now)

    def submit(self, group: Group, now: float) -> list[Effect]:
        """A finished or returned group: numbered, encoded once, kept in the outbox, sent when the window allows.

        One that the hub could not decode is handed back instead: such a message counts against this actor.
        """
        numbered = msgspec.structs.replace(group, incarnation=self.incarnation, seq=self.outbox.next_seq)
        has_answers = bool(group.members)
        try:
            check_form(numbered)
            frame = encode(numbered)
            check_size(frame, self.limits.max_message_bytes)
        except WireError as error:
            frame, has_answers = _handed_back(numbered, f"{error.counter}: {error}"), False
        except (TypeError, ValueError, OverflowError) as error:  # MessagePack has no form for it
            frame, has_answers = _handed_back(numbered, f"cannot be encoded: {error}"), False
        self.outbox.add(bytes(frame), has_answers=has_answers)
        return self._flush(now)

    def report_installed(self, message: Installed, now: float) -> list[Effect]:
        if message.ok:
            self.installed, self.turn = (message.target, message.root), 0
            if self.state is ActorState.SYNCING:
                self.state = ActorState.RUNNING
        return [Send(encode(message)), *self._send_beat(now)] if self.linked else []

    def report_released(self, turn: int, now: float) -> list[Effect]:
        """The engine holds no memory, and no version, for this turn of the learner, which waits for the message."""
        self.installed, self.turn = None, turn
        if self.state is ActorState.RUNNING:
            self.state = ActorState.SYNCING
        return self._send_beat(now) if self.linked else []

    def report_nccl(self, state: NcclState, now: float) -> list[Effect]:
        """A communicator is being built, formed or lost; sent at once, because the hub waits for it."""
        self.nccl = state
        return self._send_beat(now) if self.linked else []

    def drain(self, reason: str, now: float, deadline_s: float | None = None) -> list[Effect]:
        """Graceful shutdown: drain leases, settle the outbox, send BYE."""
        if self.state in (ActorState.DRAINING, ActorState.LEAVING, ActorState.CLOSED):
            return []
        if not self.linked:
            return self._close(0, "left without a hub")
        seconds = self.limits.drain_deadline_s if deadline_s is None else deadline_s
        self.state = ActorState.DRAINING
        self._drain_until = now + seconds
        return [Send(encode(Drain(reason, seconds, 0))), *self._send_beat(now)]

    def tick(self, now: float) -> list[Effect]:
        """Heartbeats, retries and time-outs that are due; call it at least every 50 ms."""
        if self.state is ActorState.CLOSED:
            return []
        if not self.linked:
            return self._retry(now)
        if now - self._heard_at > self.limits.hub_silent_s:
            return self._disconnect(now)
        effects: list[Effect] = []
        if now - self._beat_at >= self.limits.heartbeat_s:
            effects += self._send_beat(now)
        for oldest in self.outbox.in_flight()[:1]:
            if oldest.sent_at is not None and now - oldest.sent_at > self.limits.ack_timeout_s:
                effects.append(self._send_entry(oldest, now))
        return effects + self._leave_if_done(now)

    @property
    def linked(self) -> bool:
        return self.state in (ActorState.SYNCING, ActorState.RUNNING, ActorState.DRAINING, ActorState.LEAVING)

    def silent_s(self, now: float) -> float:
        """Seconds since the last message of the hub, or since the start."""
        return now - self._heard_at

    # --- transitions ----------------------------------------------------------------------------------------------

    def _hello(self, now: float) -> list[Effect]:
        self._hello_at = now
        hello = Hello(
            protocol_min=PROTOCOL, protocol_max=PROTOCOL, actor_id=self.actor_id, incarnation=self.incarnation,
            run_id=self.run_id, engine=self.engine, software=self.software, max_leases=self.max_leases,
            transports=self.transports, installed=self.installed, held=self.progress.held[:1024],
            outbox=self.outbox.seq_ranges()[:1024], next_seq=self.outbox.next_seq, device=self.device,
        )
        return [Send(encode(hello))]

    def _retry(self, now: float) -> list[Effect]:
        waited = now - self._disconnected_at
        if self._give_up_after_s and waited > self._give_up_after_s:
            return self._close(1, f"no hub for {waited:.0f} s (actors.give_up_after_s={self._give_up_after_s:g})")
        ceiling = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._num_retries, 10))
        if now - self._hello_at < self._jitter * ceiling:
            return []
        self._num_retries += 1
        self._jitter = self._rng.uniform(0.5, 1.0)
        return self._hello(now)

    def _disconnect(self, now: float, *, dropped: bool = False) -> list[Effect]:
        """HELLO again; `dropped` by the hub, which answered just now, so the worker need not know."""
        if self._drain_until is not None:
            return self._close(0, "left; the hub had dropped the session" if dropped else "left while disconnected")
        self.state = ActorState.DISCONNECTED
        self._disconnected_at, self._num_retries = now, 0
        return [*([] if dropped else [Deliver(Disconnected())]), *self._hello(now)]

    def _welcomed(self, welcome: Welcome, now: float) -> list[Effect]:
        if self.linked:
            return []  # the answer to a repeated HELLO
        self.limits = welcome.limits
        self.outbox.max_groups, self.outbox.max_bytes = welcome.limits.outbox_groups, welcome.limits.outbox_bytes
        self.outbox.unsend()
        self.outbox.settle(welcome.settled_upto, welcome.settled)
        self.outbox.forget(welcome.durable_upto, welcome.durable)
        self.run_id, self.learner_epoch = welcome.run_id, welcome.learner_epoch
        self.turn = 0  # the worker reports again, for the turn that this hub is at
        # With a version installed generation goes on; the ledger decides what that version is good for.
        self.state = ActorState.SYNCING if self.installed is None else ActorState.RUNNING
        self._num_retries = 0
        return [Deliver(welcome), *self._send_beat(now), *self._flush(now)]

    def _acked(self, ack: Ack, now: float) -> list[Effect]:
        if ack.incarnation != self.incarnation:
            return []
        for one in ack.rejected:
            self.outbox.forget(0, [(one.seq, one.seq)])
        if self.outbox.settle(ack.settled_upto, ack.accepted):
            self._evicted_at.clear()  # the rejected ones are gone by now: these are kept
        self.outbox.forget(ack.durable_upto, ack.durable)
        for one in ack.rejected:
            if one.reason == RejectReason.FENCED:
                return self._close(EXIT_FENCED, "a newer process with this actor_id has taken over")
        return self._flush(now) + self._leave_if_done(now)

    def _stopped(self, stop: Stop, now: float) -> list[Effect]:
        if stop.reason == StopReason.NO_LINK:
            return self._disconnect(now, dropped=True) if self.linked else []
        if stop.reason == StopReason.EVICTED and stop.rejoin:
            self._evicted_at = [at for at in self._evicted_at if now - at < EVICTIONS_S] + [now]
            if len(self._evicted_at) >= MAX_EVICTIONS:
                return [Deliver(stop), *self._close(EXIT_EVICTED, f"evicted three times: {stop.detail}")]
            return self._disconnect(now, dropped=True)
        if stop.rejoin:
            return self._disconnect(now) if self.linked else []
        return [Deliver(stop), *self._close(stop.exit_code, stop.detail)]

    def _close(self, exit_code: int, detail: str) -> list[Effect]:
        self.state = ActorState.CLOSED
        return [LinkClosed(exit_code, detail)]

    def _leave_if_done(self, now: float) -> list[Effect]:
        if self.state is ActorState.DRAINING:
            done = not self.progress.held and self.outbox.all_settled()
            if done or (self._drain_until is not None and now > self._drain_until):
                self.state = ActorState.LEAVING
                self._bye_at = now
                return [Send(encode(Bye(self.outbox.next_seq - 1, "drained" if done else "deadline")))]
        if self.state is ActorState.LEAVING and now - self._bye_at > self.limits.bye_timeout_s:
            self._num_byes += 1
            self._bye_at = now
            if self._num_byes >= 3:
                return self._close(0, "left; the hub did not answer BYE")
            return [Send(encode(Bye(self.outbox.next_seq - 1, "again")))]
        return []

    def _flush(self, now: float) -> list[Effect]:
        if not self.linked:
            return []
        room = MAX_UNSETTLED - len(self.outbox.in_flight())
        return [self._send_entry(entry, now) for entry in self.outbox.waiting()[: max(0, room)]]

    def _send_entry(self, entry: Entry, now: float) -> Send:
        entry.sent_at = now
        return Send(entry.frame)

    def _send_beat(self, now: float) -> list[Effect]:
        self._beat_at = now
        self._beat += 1
        progress = self.progress
        taking = self.state is ActorState.RUNNING and not self.outbox.full
        installed, root = self.installed or (None, b"")
        beat = ActorHeartbeat(
            incarnation=self.incarnation, beat=self._beat, state=self.state, free=progress.free if taking else 0,
            running=progress.running, installed=installed, tokens_total=progress.tokens_total,
            stuck=progress.stuck[:64], outbox_groups=min(len(self.outbox), 65535), outbox_bytes=self.outbox.num_bytes,
            free_eval=progress.free_eval if taking else 0, stats=progress.stats, max_leases=progress.max_leases,
            root=root, held=progress.held if len(progress.held) <= 1024 else None, nccl=self.nccl, turn=self.turn,
        )
        return [Send(encode(beat))]


def _handed_back(group: Group, detail: str) -> bytearray:
    """The frame of the same lease without members; all of them count as failed."""
    log.error("a finished group is handed back, the hub would refuse it: %s", detail)
    return encode(msgspec.structs.replace(
        group, outcome=Outcome.RETURNED, reason=ReturnReason.ENV_ERROR, members=(), answers=(),
        detail=detail[:512].encode("utf-8", "replace").decode(),
        stats={NUM_FAILED_EPISODES: float(len(group.members))},
    ))
