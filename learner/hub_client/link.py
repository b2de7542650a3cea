"""A rank's connection to the hub: one DEALER, used from the training thread only."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import msgspec
import zmq

from streamrl.errors import StreamrlError, TaskError
from streamrl.messages import (
    HUB_TO_RANK,
    Agreement,
    Base,
    BatchPending,
    BatchRequest,
    BatchShare,
    EndGroup,
    EvalRequest,
    EvalResult,
    HubStatus,
    KeptGroup,
    Layout,
    Manifest,
    Message,
    Publish,
    RankReady,
    Saved,
    Shutdown,
    Snapshot,
    SnapshotRequest,
    StepDone,
    StopRequest,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.transport.authentication import connect_with
from streamrl.transport.awake import AwakeClock
from streamrl.transport.keys import ActorKey
from streamrl.transport.sockets import allow_ipv6

log = logging.getLogger("streamrl.learner")

POLL_MS = 100
HUB_SILENT_S, STOPPING_SILENT_S = 30.0, 5.0
"""Longest wait for any message of the hub, and once a stop was requested."""

SCORED = "num_eval_groups"
"""The hub's counter of scored answers of evaluations."""
COMPLETED, NOT_KEPT = "num_groups_completed", ("num_groups_filtered", "num_groups_stale")
"""The hub's counters of groups for training that arrived, and of those among them that no batch will have."""


class HubLink:
    """Sends and waits; while it waits it watches for stalls, the hub's health and a request to stop.

    Args:
        check_hub: raises if the hub process has ended (rank 0); a no-op elsewhere.
        stop_requested: true once this process was told to stop; then no further batch is requested.
        stall_report_s, stall_fail_s: see the settings of the same name.
        key: shown to a hub on another machine.
        rank_silent_s: a rank waits no shorter for the hub than the hub for a rank.
    """

    def __init__(
        self, endpoint: str, *, rank: int, world: int, version: int, check_hub: Callable[[], None],
        stop_requested: Callable[[], bool], stall_report_s: float, stall_fail_s: float, key: ActorKey | None = None,
        rank_silent_s: float = 0.0,
    ) -> None:
        self.status = HubStatus(version, {}, ())
        self.evals: list[EvalResult] = []
        self._asked: set[int] = set()  # evaluations without a result
        self._moved_at = -math.inf  # when a group was last kept, or an answer of an evaluation scored
        self._most_kept = 0.0  # groups at a time, since this batch was asked for
        self.halted: str | None = None
        self.on_idle: Callable[[], None] = lambda: None
        """Called at every turn of a wait, in the waiting thread; it may send."""
        self.dropped: Callable[[Sequence[KeptGroup], int], None] = lambda groups, version: None
        """Rank 0: called with some of the groups before a first batch that were all dropped."""
        self._ready = RankReady(rank, world, version)
        self._check_hub, self._stop_requested = check_hub, stop_requested
        self._stall_report_s, self._stall_fail_s = stall_report_s, stall_fail_s
        self._hub_silent_s = max(HUB_SILENT_S, rank_silent_s)
        self._decoder = Decoder(HUB_TO_RANK, max_bytes=1 << 40)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if key is not None:
            connect_with(self._socket, key)
        allow_ipv6(self._socket, endpoint)
        self._socket.connect(endpoint)
        self._send(self._ready)
        self._clock = AwakeClock()  # a hub that was stopped with this process was not silent
        self._heard_at = self._reported_at = self._clock()

    def wait_until_up(self) -> None:
        """Wait, on rank 0, until the hub has bound its sockets and answers."""
        while not isinstance(self._receive(), HubStatus):
            pass

    def next_batch(self, version: int) -> BatchShare | None:
        """Request this rank's share of the batch that is trained at `version`; None if the run is to stop.

        Raises:
            TaskError: every episode fails.
            StreamrlError: the hub is gone, or no batch came for learner.stall_fail_s although actors are there.
        """
        rank = self._ready.rank
        self._send(BatchRequest(rank, version))
        self._reported_at, self._most_kept = self._clock(), _num_kept(self.status)
        told_to_stop = False
        while True:
            if self._stop_requested() and not told_to_stop:
                self._send(StopRequest("a stop was requested"))
                told_to_stop = True
            message = self._receive()
            self._check_fatal()
            match message:
                case BatchShare():
                    return message
                case StopRequest():
                    self.halted = message.reason
                    return None
                case BatchPending() if rank == 0:  # it decides for all: they also wait here while it evaluates or saves
                    if message.passed_over:
                        self.dropped(message.passed_over, version)
                    self._check_stall("no batch", message.waited_s, message.num_actors, message.waiting_for)

    def trained(
        self, version: int, *, skipped: bool, reason: str = "", bounds: tuple[int, int] | None = None,
        agreements: tuple[Agreement, ...] = (), trained: bool = True, seconds: float = 0.0, grad_norm: float = 0.0,
    ) -> None:
        """Report that the batch is trained or set aside; `bounds` are eta and max_lag from now on, None leaves them."""
        self._send(StepDone(version, skipped, reason, bounds, agreements, trained, seconds, grad_norm))

    def publish(
        self, manifest: Manifest, path: str, nbytes: int, layout: Layout | None, assets_path: str,
        device_manifest: Manifest | None = None, *, base: tuple[Base, str] | None = None,
    ) -> None:
        held, base_path = base or (None, "")
        self._send(Publish(manifest, path, nbytes, layout, assets_path, device_manifest, held, base_path))

    def freeze(self, version: int) -> bytes:
        """Request the ledger as of this version, for the checkpoint."""
        self._send(SnapshotRequest(version))
        while True:
            message = self._receive()
            if isinstance(message, Snapshot) and message.version == version:
                return message.state

    def saved(self, version: int) -> None:
        self._send(Saved(version))

    def evaluate(
        self, eval_id: int, version: int, num_prompts: int, keep: tuple[int, ...] = (), num_responses: int = 1,
        dataset: str = "", *, waits: bool = False,
    ) -> None:
        """Request an evaluation, with transcripts of the prompts `keep`; its result arrives in `evals` later."""
        self._asked.add(eval_id)
        self._send(EvalRequest(eval_id, version, num_prompts, keep, num_responses, dataset, waits))

    def wait_for_evals(self) -> None:
        """Wait until every result is in `evals`, or a stop was requested."""
        began = self._reported_at = self._clock()
        while self._asked and not self._stop_requested():
            self._receive()
            self._check_fatal()
            num_actors = len(self.status.actors)
            waited_s = self._clock() - began
            self._check_stall("evaluation unfinished", waited_s, num_actors, "see the end of the actors' logs")

    def _check_fatal(self) -> None:
        if self.status.fatal:
            raise TaskError(self.status.fatal)

    def _check_stall(self, what: str, waited_s: float, num_actors: int, detail: str) -> None:
        """Report a long wait now and then; fail once it is too long although actors could end it.

        Actors whose groups are kept, or that answer an evaluation, are not stalled, however long a batch takes them.
        """
        if self._clock() - self._reported_at > self._stall_report_s:
            self._reported_at = self._clock()
            log.warning("%s for %.0f s with %d actors connected: %s", what, waited_s, num_actors, detail)
        idle_s = min(waited_s, self._clock() - self._moved_at)
        if self._stall_fail_s and num_actors and idle_s > self._stall_fail_s:
            raise StreamrlError(
                f"{what} for {waited_s:.0f} s although {num_actors} actors are connected "
                f"(learner.stall_fail_s={self._stall_fail_s:g}): {detail}"
            )

    def poll(self) -> None:
        """Take in what has arrived; never waits."""
        while self._socket.poll(0):
            self._receive()

    def refresh_status(self) -> None:
        """Wait for counters that cover everything sent so far."""
        self.poll()
        self._send(self._ready)
        self.wait_until_up()

    def shutdown(self, reason: str, *, finished: bool) -> None:
        """Send the final message."""
        self._send(Shutdown(reason, finished))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _receive(self) -> Message | None:
        """Return the next message, or None after a short wait; keeps `status` and `evals`."""
        self.on_idle()
        if not self._socket.poll(POLL_MS):
            self._check_hub()
            silent_s = self._clock() - self._heard_at
            if silent_s > (STOPPING_SILENT_S if self._stop_requested() else self._hub_silent_s):
                raise StreamrlError(
                    f"rank {self._ready.rank} has had no message of the hub for {silent_s:.0f} s: it is presumed dead"
                )
            return None
        message = self._decoder.decode(self._socket.recv())
        self._heard_at = self._clock()
        if isinstance(message, HubStatus):
            kept = _num_kept(message)
            if kept > self._most_kept or message.counters.get(SCORED, 0.0) != self.status.counters.get(SCORED, 0.0):
                self._moved_at = self._heard_at
            self._most_kept, self.status = max(self._most_kept, kept), message
        elif isinstance(message, BatchShare) and message.stats:  # counters as of this cut: newer than the status
            self.status = msgspec.structs.replace(self.status, counters=message.stats)
        elif isinstance(message, EndGroup):
            raise StreamrlError(message.cause)
        elif isinstance(message, EvalResult):
            self._moved_at = self._heard_at
            self.evals.append(message)
            self._asked.discard(message.eval_id)
        return message

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))


def _num_kept(status: HubStatus) -> float:
    """Groups for training so far that were, or may still be, in a batch."""
    counters = status.counters
    return counters.get(COMPLETED, 0.0) - sum(counters.get(name, 0.0) for name in NOT_KEPT)
