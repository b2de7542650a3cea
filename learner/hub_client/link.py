"""A rank's end of the line to its hub: one DEALER, used from the training thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from streamrl.errors import StreamrlError
from streamrl.messages import (
    HUB_TO_RANK,
    BatchPending,
    BatchRequest,
    BatchShare,
    EvalRequest,
    EvalResult,
    HubStatus,
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

log = logging.getLogger("streamrl.learner")

POLL_MS = 100
HUB_SILENT_S = 30.0
STOPPING_SILENT_S = 5.0


class HubLink:
    """Asks and waits; while it waits it looks after stalls, the hub's health and a request to stop.

    Args:
        check_hub: raises if the hub process has ended (rank 0); a no-op elsewhere.
        stop_requested: true once this process was told to stop; then no further batch is asked for.
        stall_report_s, stall_fail_s: see the settings of the same name.
    """

    def __init__(
        self, endpoint: str, *, rank: int, world: int, version: int, check_hub: Callable[[], None],
        stop_requested: Callable[[], bool], stall_report_s: float, stall_fail_s: float,
    ) -> None:
        self.rank, self.version, self._world = rank, version, world
        self.status = HubStatus(version, {}, ())
        self.evals: list[EvalResult] = []
        self.halted: str | None = None
        self._check_hub, self._stop_requested = check_hub, stop_requested
        self._stall_report_s, self._stall_fail_s = stall_report_s, stall_fail_s
        self._decoder = Decoder(HUB_TO_RANK, max_bytes=1 << 40)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)
        self._send(RankReady(rank, world, version))
        self._heard_at = time.monotonic()

    def wait_until_up(self) -> None:
        """Rank 0: the hub has bound its sockets and answers."""
        while not isinstance(self._receive(), HubStatus):
            self._look_after(None)

    def next_batch(self, version: int) -> BatchShare | None:
        """This rank's share of the batch that is trained at `version`; None if the run is to stop.

        Raises:
            StreamrlError: the hub is gone, or no batch came for learner.stall_fail_s although actors are there.
        """
        self._send(BatchRequest(self.rank, version))
        asked = reported = time.monotonic()
        asked_to_stop = False
        while True:
            if self._stop_requested() and not asked_to_stop:
                self._send(StopRequest("a stop was requested"))
                asked_to_stop = True
            message = self._receive()
            match message:
                case BatchShare():
                    return message
                case StopRequest():
                    self.halted = message.reason
                    return None
                case BatchPending():
                    now = time.monotonic()
                    if now - reported > self._stall_report_s and self.rank == 0:
                        reported = now
                        log.warning("no batch for %.0f s: %s", now - asked, message.waiting_for)
                    self._fail_if_stalled(message)
            self._look_after(message)

    def _fail_if_stalled(self, wait: BatchPending) -> None:
        # Rank 0 decides for all: the others also wait here while it evaluates or saves.
        if self.rank == 0 and self._stall_fail_s and wait.num_actors and wait.waited_s > self._stall_fail_s:
            raise StreamrlError(
                f"no batch for {wait.waited_s:.0f} s although {wait.num_actors} actors are connected "
                f"(learner.stall_fail_s={self._stall_fail_s:g}): {wait.waiting_for}"
            )

    def trained(
        self, version: int, *, skipped: bool, reason: str = "", bounds: tuple[int, int] | None = None
    ) -> None:
        """The batch is trained or set aside; `bounds` are the eta and max_lag from now on, None leaves them."""
        self._send(StepDone(version, skipped, reason, bounds))

    def publish(
        self, manifest: Manifest, path: str, nbytes: int, layout: Layout | None, assets_path: str,
        device_manifest: Manifest | None = None,
    ) -> None:
        self._send(Publish(manifest, path, nbytes, layout, assets_path, device_manifest))

    def freeze(self, version: int) -> bytes:
        """The ledger as of this version, for the checkpoint."""
        self._send(SnapshotRequest(version))
        while True:
            message = self._receive()
            if isinstance(message, Snapshot) and message.version == version:
                return message.state
            self._look_after(message)

    def saved(self, version: int) -> None:
        self._send(Saved(version))

    def evaluate(self, eval_id: int, version: int, num_prompts: int) -> None:
        """Ask for an evaluation; the result arrives in `evals` some time later."""
        self._send(EvalRequest(eval_id, version, num_prompts))

    def wait_for_eval(self, eval_id: int) -> EvalResult | None:
        """The result, or None if a stop was requested meanwhile."""
        asked = reported = time.monotonic()
        while True:
            for result in self.evals:
                if result.eval_id == eval_id:
                    return result
            if self._stop_requested():
                return None
            message = self._receive()
            now = time.monotonic()
            if self._stall_fail_s and self.status.actors and now - asked > self._stall_fail_s:
                raise StreamrlError(
                    f"evaluation {eval_id} unfinished after {now - asked:.0f} s although {len(self.status.actors)} "
                    f"actors are connected (learner.stall_fail_s={self._stall_fail_s:g})"
                )
            if now - reported > self._stall_report_s:
                reported = now
                log.warning("evaluation unfinished after %.0f s: %d actors are connected",
                            now - asked, len(self.status.actors))
            self._look_after(message)

    def poll(self) -> None:
        """Take in what has arrived; never waits."""
        while self._socket.poll(0):
            self._look_after(self._receive())

    def refresh_status(self) -> None:
        """Wait for counters that cover everything sent so far."""
        self.poll()
        self._send(RankReady(self.rank, self._world, self.version))
        self.wait_until_up()

    def shutdown(self, reason: str, *, finished: bool) -> None:
        """The last word."""
        self._send(Shutdown(reason, finished))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _receive(self) -> Message | None:
        if not self._socket.poll(POLL_MS):
            return None
        message = self._decoder.decode(self._socket.recv())
        self._heard_at = time.monotonic()
        if isinstance(message, HubStatus):
            self.status = message
        elif isinstance(message, BatchShare) and message.stats:  # counters as of this cut: newer than the second's
            self.status = msgspec.structs.replace(self.status, counters=message.stats)
        elif isinstance(message, EvalResult):
            self.evals.append(message)
        return message

    def _look_after(self, message: Message | None) -> None:
        if message is None:
            self._check_hub()
            silent = time.monotonic() - self._heard_at
            if silent > (STOPPING_SILENT_S if self._stop_requested() else HUB_SILENT_S):
                raise StreamrlError(f"rank {self.rank} has not heard the hub for {silent:.0f} s: it is presumed dead")

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))
