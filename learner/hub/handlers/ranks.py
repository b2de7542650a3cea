"""The learner ranks' messages: batches out; steps, versions and checkpoints in."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from learner.hub.context.hub_context import HubContext
from learner.hub.handlers.broadcaster import BroadcastHandler
from learner.hub.ledger.plan import share_batch
from learner.hub.ledger.tables.groups import GroupState
from learner.hub.liveness.ranks import Finding
from learner.hub.observers.counters import all_dropped, all_equal
from streamrl.errors import StreamrlError, WireError
from streamrl.messages import (
    RANK_TO_HUB,
    BatchPending,
    BatchRequest,
    BatchShare,
    BroadcastReport,
    BroadcastUp,
    EndGroup,
    EvalRequest,
    HubStatus,
    Message,
    Publish,
    RankBeat,
    RankReady,
    Saved,
    Shutdown,
    Snapshot,
    SnapshotRequest,
    StepDone,
    StopRequest,
)
from streamrl.messages.codec import Decoder
from streamrl.stream.records import Evaluated, RunStopped, StepTaken

log = logging.getLogger("streamrl.hub")

MAX_REPLACED = 8
"""Versions in a row that may be gone before they are served; more, and the hub does not see the learner's files."""


class RankHandler:
    """Serves one batch at a time: rank 0's request cuts it, and every rank gets its share of that cut.

    Args:
        shut_down: ends the hub as the message asks.
    """

    def __init__(self, hub: HubContext, broadcast: BroadcastHandler, shut_down: Callable[[Shutdown], None]) -> None:
        self._hub, self._broadcast, self._shut_down = hub, broadcast, shut_down
        self._decoder = Decoder(RANK_TO_HUB, max_bytes=1 << 40)
        self._routes: dict[int, bytes] = {}
        self._requested_at: dict[int, float] = {}
        self._version, self._num_replaced = -1, 0
        self._shares: dict[int, BatchShare] = {}
        self._stop_reason: str | None = None
        self._evals: set[int] = set()
        self._eval_waited_for: int | None = None  # its version
        self._warned, self._counts_before = False, hub.ledger.counts.copy()
        self._cuts: deque[tuple[int, int]] = deque(maxlen=8)  # (version, its record in the log) of the last batches
        # (record, sender, message, what to do once the log has that record on the disk), in order
        self._held: deque[tuple[int, bytes, Message, Callable[[float], None]]] = deque()

    def received(self, routing_id: bytes, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            message = self._decoder.decode(frames[0])
        except WireError as error:
            self._hub.counters[f"num_wire_errors_{error.counter}"] += 1
            log.warning("refused a message on the socket of the ranks (%s): %s", error.counter, error)
            return
        try:
            self._act(routing_id, message, now)
        except (ValueError, OSError, StreamrlError) as error:
            self._refuse(routing_id, message, error)

    def _refuse(self, routing_id: bytes, message: Message, error: Exception) -> None:
        """Tell the sender that nothing was done: it fails with this cause, and the hub goes on for the others."""
        ranks = [rank for rank, route in self._routes.items() if route == routing_id]
        who = f"learner rank {ranks[0]}" if ranks else "a process that is no learner rank"
        cause = f"the hub refused {type(message).__name__} of {who}: {error}"
        self._hub.counters["num_wire_errors_rank"] += 1
        log.error("%s", cause)
        self._hub.send.to_rank(routing_id, EndGroup(cause[:2048]))

    def _act(self, routing_id: bytes, message: Message, now: float) -> None:
        """Do what a message asks. Raises ValueError, OSError or StreamrlError for what makes no sense now."""
        ledger = self._hub.ledger
        match message:
            case RankReady():
                self._routes[message.rank] = routing_id
                self._send(message.rank, self._status(now))
            case BatchRequest():
                self._request(message, now)
            case StepDone():
                ledger.end_batch(StepTaken(
                    message.version, message.skipped, message.reason, message.trained, message.seconds,
                    message.grad_norm, message.bounds,
                ))
                self._hub.trust.compared(message.agreements)
                self._tell_once(partial(all_equal, batch_size=ledger.lag.rule.groups_per_batch))
            case RankBeat():
                self._hub.rank_watch.beat(routing_id, message, now)
            case Publish():
                ledger.publish(message.manifest)
                # No weights go out whose batch a crash could still take back: others would come to have their name.
                trained = max((one for version, one in self._cuts if version < message.manifest.ref.version), default=0)
                self._once_logged(trained, routing_id, message, partial(self._serve_version, message), now)
            case BroadcastUp() | BroadcastReport():
                self._broadcast.broadcaster_reported(routing_id, message, now)
            case EvalRequest():
                if message.dataset not in ledger.eval_sources:
                    raise ValueError(f"no evaluation set {message.dataset!r}, only {sorted(ledger.eval_sources)}")
                ledger.evals.request(
                    message.eval_id, message.version, message.num_prompts, message.keep, message.num_responses,
                    message.dataset,
                )
                self._evals.add(message.eval_id)
                if message.waits:
                    self._eval_waited_for = message.version
            case SnapshotRequest():
                state = ledger.freeze(message.version)
                self._hub.log.frozen(message.version, state)
                # It stands for what the log has before it: frames, and the groups that it says were accepted.
                snapshot = Snapshot(message.version, state)
                end = ledger.journal.next_sequence - 1
                self._once_logged(end, routing_id, message, lambda now: self._send(0, snapshot), now)
            case Saved():
                ledger.saved(message.version)
                self._hub.log.saved(message.version)
            case StopRequest():
                self._stop_reason = message.reason
            case Shutdown():
                ledger.journal.append(RunStopped(message.reason, message.finished))
                self._shut_down(message)

    def _serve_version(self, message: Publish, now: float) -> None:
        try:
            self._hub.weights.publish(message, now)
        except FileNotFoundError:
            # A learner of many steps a second replaced it while it waited for the log; a newer version follows.
            self._num_replaced += 1
            if self._num_replaced > MAX_REPLACED or Path(message.path).exists():  # something else is missing
                raise
            log.info("version %s was replaced before it could be served", message.manifest.ref)
            return
        self._num_replaced = 0
        self._broadcast.published(message, now)

    def _once_logged(
        self, sequence: int, routing_id: bytes, message: Message, action: Callable[[float], None], now: float
    ) -> None:
        """Do this once the log has a record on the disk, and after what waits already."""
        if self._held or sequence > self._hub.log.durable:
            self._held.append((sequence, routing_id, message, action))
        else:
            action(now)

    def logged(self, now: float) -> None:
        """Do what waited for the log."""
        while self._held and self._held[0][0] <= self._hub.log.durable:
            _, routing_id, message, action = self._held.popleft()
            try:
                action(now)
            except (ValueError, OSError, StreamrlError) as error:
                self._refuse(routing_id, message, error)

    def watch(self, now: float) -> None:
        """End the process group if one of its ranks is dead, stopped or has failed."""
        finding = self._hub.rank_watch.check(now)
        if finding is not None:
            log.error("%s: the learner's process group ends here", finding.cause)
            self.end_group(finding)

    def end_group(self, finding: Finding) -> None:
        """Order every rank that can be reached to exit, and kill those that cannot."""
        for route in self._hub.rank_watch.routes():
            self._hub.send.to_rank(route, EndGroup(finding.cause[:2048]))
        for pid in finding.kill:  # a stopped process reads nothing
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _request(self, request: BatchRequest, now: float) -> None:
        num_ranks = len(self._hub.settings.dp_ranks)
        if request.rank >= num_ranks:
            raise ValueError(f"no rank {request.rank}: the run has {num_ranks} ranks")
        if not self._shares:
            self._hub.ledger.cutter.check_version(request.version)
        elif request.version != self._version:
            raise ValueError(
                f"rank {request.rank} requests version {request.version}, but ranks {sorted(self._shares)} have not "
                f"taken their share of version {self._version}"
            )
        self._requested_at[request.rank] = now
        self._version = request.version

    def serve(self, now: float) -> None:
        """Cut if a rank waits and the ledger can; hand out shares; report evaluations."""
        if self._requested_at and not self._shares:
            if self._stop_reason is not None:  # nothing of this version was cut, so every rank gets the same answer
                for rank in self._requested_at:
                    self._send(rank, StopRequest(self._stop_reason))
                self._requested_at.clear()
            # Rank 0's StepDone and Publish precede its request on one connection: the ledger is up to date by now.
            elif 0 in self._requested_at:
                self._cut()
        self._take_turns()
        for rank in self._requested_at.keys() & self._shares.keys() if self._hub.turns.learner_may_work else ():
            self._send(rank, self._shares.pop(rank))
            del self._requested_at[rank]
        for eval_id in list(self._evals):
            self._finish_eval(eval_id)

    def _take_turns(self) -> None:
        """Begin the learner's turn once actors have nothing left to do for it, and theirs once it needs more."""
        hub, ledger = self._hub, self._hub.ledger
        if not hub.turns.is_on:
            return
        if self._shares:
            if not self._evals and not ledger.groups.num(GroupState.LEASED):
                hub.turns.to_learner()
            return
        all_wait = len(self._requested_at) == len(hub.settings.dp_ranks)
        version = self._version if all_wait else self._eval_waited_for
        manifest = hub.weights.manifest
        if version is not None and manifest is not None and manifest.ref.version >= version:
            self._eval_waited_for = None
            hub.turns.to_actors()

    def _cut(self) -> None:
        ledger, settings = self._hub.ledger, self._hub.settings
        groups = ledger.cut_batch(self._version, settings.dp_ranks, settings.num_minibatches)
        if groups is None:
            return
        assert ledger.cutter.newest is not None
        self._cuts.append((self._version, ledger.journal.next_sequence - 1))
        shares = share_batch(groups, self._version, settings.dp_ranks, plan=ledger.cutter.newest.plan)
        self._shares = dict(enumerate(shares))
        self._shares[0] = msgspec.structs.replace(
            self._shares[0], stats=self._counters(), passed_over=self._hub.ledger.passed_over.take()
        )

    def _finish_eval(self, eval_id: int) -> None:
        run = self._hub.ledger.evals.get(eval_id)
        if run is not None and run.done:
            self._evals.discard(eval_id)
            result = run.result()
            self._hub.ledger.journal.append(Evaluated(
                result.version, result.dataset, result.score, result.prompt_scores
            ))
            failed = not result.num_prompts and not result.num_unanswered
            failure = (self._hub.failures.last or "see the logs of the actors") if failed else ""
            self._send(0, msgspec.structs.replace(result, failure=failure))

    def report(self, now: float) -> None:
        """Send the reason of the wait to waiting ranks and counters to rank 0; called once a second."""
        hub = self._hub
        hub.waiting_for = self._wait_reason(now)
        waits = 0 in self._requested_at
        passed_over = hub.ledger.passed_over.take() if waits and self._tell_once(all_dropped) else ()
        for rank, since in self._requested_at.items():
            self._send(rank, BatchPending(
                self._version, hub.waiting_for[:512], now - since, len(hub.connections), () if rank else passed_over,
            ))
        self._send(0, self._status(now))

    def _tell_once(self, teaches_nothing: Callable[[Counter[str], float | None], str]) -> bool:
        """Say what is wrong with the rewards since the start of this hub, if anything is and it was not said yet."""
        counts = self._hub.ledger.counts.copy()
        counts.subtract(self._counts_before)  # of a resumed run, what arrived since
        told = "" if self._warned else teaches_nothing(counts, self._hub.arrivals.equal_reward)
        if told:
            self._warned = True
            self._hub.notify(told)
        return bool(told)

    def _wait_reason(self, now: float) -> str:
        """Return what the learner waits for, as a sentence; "" while it does not wait."""
        ledger = self._hub.ledger
        if self._shares and (holding := self._hub.turns.holding()):
            return f"{len(holding)} actors finish their work and give their engines' memory back"
        if self._requested_at:
            return ledger.wait_reason(now)
        evaluation = ledger.evals.get(min(self._evals)) if self._evals else None
        if evaluation is None:
            return ""
        return evaluation.progress() + ("" if len(self._hub.connections) else "; no actor is connected")

    def _status(self, now: float) -> HubStatus:
        actors = tuple(
            (actor.actor_id, f"{actor.state} {actor.version}", actor.tokens_per_s, now - actor.heard_at)
            for actor in self._hub.connections.all()
        )
        failures = self._hub.failures
        return HubStatus(max(self._version, 0), self._counters(), actors, failures.first, self._hub.fatal)

    def _counters(self) -> dict[str, float]:
        hub = self._hub
        return {
            **hub.ledger.counters(),
            **{key: float(value) for key, value in hub.counters.items()},
            **hub.weights.metrics(),
            **self._broadcast.metrics(),
            **{name: value for one in hub.observers for name, value in one.metrics().items()},
            "num_actors": float(len(hub.connections)),
            "tokens_per_s_generate": sum(actor.tokens_per_s for actor in hub.connections.all()),
        }

    def _send(self, rank: int, message: Message) -> None:
        routing_id = self._routes.get(rank)
        if routing_id is not None:
            self._hub.send.to_rank(routing_id, message)
