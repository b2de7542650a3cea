"""The learner ranks' messages: batches out, steps, versions and checkpoints in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from learner.hub.handlers.batches import plan_batch
from streamrl.messages import (
    RANK_TO_HUB,
    BatchPending,
    BatchRequest,
    BatchShare,
    BroadcastReport,
    BroadcastUp,
    EvalRequest,
    EvalResult,
    HubStatus,
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

if TYPE_CHECKING:
    from learner.hub.server import HubServer

log = logging.getLogger("streamrl.hub")


class RankHandler:
    """One batch at a time: the first Take of a version cuts it, every rank gets its share of that cut."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.waiting_for = ""
        self._decoder = Decoder(RANK_TO_HUB, max_bytes=1 << 40)
        self._routes: dict[int, bytes] = {}
        self._takes: dict[int, float] = {}
        self._version = -1
        self._shares: dict[int, BatchShare] = {}
        self._halted: str | None = None
        self._evals: set[int] = set()

    def received(self, routing_id: bytes, frames: list[bytes], now: float) -> None:
        message = self._decoder.decode(frames[0])
        ledger = self.hub.ledger
        match message:
            case RankReady():
                self._routes[message.rank] = routing_id
                self._send(message.rank, self.status(now))
            case BatchRequest():
                self._take(message, now)
            case StepDone():
                ledger.trained(message.version, message.skipped, message.reason)
                if message.bounds is not None:
                    ledger.set_bounds(*message.bounds)
            case Publish():
                self.hub.weights.publish(message, now)
                ledger.publish(message.manifest.ref)
                self.hub.devices.published(message, now)
            case BroadcastUp() | BroadcastReport():
                self.hub.devices.sender_said(routing_id, message, now)
            case EvalRequest():
                ledger.eval_request(message.eval_id, message.version, message.num_prompts, now)
                self._evals.add(message.eval_id)
            case SnapshotRequest():
                self._send(0, Snapshot(message.version, ledger.freeze(message.version)))
            case Saved():
                ledger.saved(message.version)
            case StopRequest():
                self._halted = message.reason
            case Shutdown():
                self.hub.stop(message.reason, finished=message.finished)

    def _take(self, take: BatchRequest, now: float) -> None:
        self._takes[take.rank] = now
        if take.version != self._version and self._shares:
            left = sorted(self._shares)
            assert take.version > self._version, f"rank {take.rank} takes {take.version} after {self._version}"
            assert not left, f"ranks {left} have not taken their share of version {self._version}"
        self._version = take.version

    def serve(self, now: float) -> None:
        """Cut if a rank waits and the ledger can; hand out shares; report evaluations."""
        if self._takes and not self._shares:
            if self._halted is not None:  # nothing of this version was cut, so every rank will hear the same
                for rank in list(self._takes):
                    self._send(rank, StopRequest(self._halted))
                self._takes.clear()
            # Rank 0's TRAINED and PUBLISH precede its TAKE on one connection: when it asks, the ledger is up to date.
            elif 0 in self._takes:
                self._cut(now)
        for rank in [rank for rank in self._takes if rank in self._shares]:
            self._send(rank, self._shares.pop(rank))
            del self._takes[rank]
        for eval_id in list(self._evals):
            self._finish_eval(eval_id)

    def _cut(self, now: float) -> None:
        groups = self.hub.ledger.cut_batch(self._version)
        if groups is None:
            return
        world = self.hub.settings.world
        rows = plan_batch(groups, world)
        rank_of = {row.group_id: row.rank for row in rows}
        for rank in range(world):
            frames = tuple(bytes(f) for group in groups if rank_of.get(group.group_id) == rank for f in group.frames)
            stats = self._counters() if rank == 0 else {}
            self._shares[rank] = BatchShare(self._version, tuple(rows), frames, stats=stats)

    def _finish_eval(self, eval_id: int) -> None:
        outcome = self.hub.ledger.eval_result(eval_id)
        if outcome is None or not outcome.done:
            return
        self._evals.discard(eval_id)
        self._send(0, EvalResult(
            eval_id, outcome.version, outcome.num_scored, outcome.score, outcome.reward,
            outcome.mean_tokens, outcome.truncated_fraction, dict(outcome.scores),
        ))

    def report(self, now: float) -> None:
        """Once a second: proof of life and the reason of the wait to waiting ranks, counters to rank 0."""
        self.waiting_for = self.hub.ledger.why_waiting(now) if self._takes or self._evals else ""
        num_actors = len(self.hub.control.links)
        for rank, since in self._takes.items():
            self._send(rank, BatchPending(self._version, self.waiting_for[:512], now - since, num_actors))
        if 0 in self._routes:
            self._send(0, self.status(now))

    def status(self, now: float) -> HubStatus:
        actors = tuple(
            (link.actor_id, f"{link.state} {link.version}", link.tokens_per_s, now - link.heard_at)
            for link in self.hub.control.links.all()
        )
        return HubStatus(max(self._version, 0), self._counters(), actors)

    def _counters(self) -> dict[str, float]:
        control = self.hub.control
        return {
            **self.hub.ledger.counters(),
            **{key: float(value) for key, value in self.hub.counters.items()},
            **self.hub.weights.metrics(),
            **self.hub.devices.metrics(),
            **control.checks.metrics(),
            "num_actors": float(len(control.links)),
            "num_actor_restarts": float(control.num_actor_restarts),
            "tokens_generated": float(control.tokens_generated),
            "tokens_per_s_generate": sum(link.tokens_per_s for link in control.links.all()),
        }

    def _send(self, rank: int, message: Message) -> None:
        routing_id = self._routes.get(rank)
        if routing_id is not None:
            self.hub.send_rank(routing_id, encode(message))
