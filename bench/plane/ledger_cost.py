"""Cost of the ledger per group by the number of linked actors, in this process and without sockets."""

from __future__ import annotations

import time
from collections import deque

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.settings import LedgerSettings
from streamrl.lag_rule import LagRule
from streamrl.messages import (
    ActorHeartbeat,
    ActorState,
    Group,
    Hello,
    Lease,
    Limits,
    Manifest,
    Member,
    Outcome,
    ReturnReason,
    Sampling,
    Span,
    Turn,
    VersionRef,
)
from streamrl.messages.codec import encode, pack_ids, pack_logprobs
from streamrl.stream.records import StepTaken

MAX_LEASES = 2


class LedgerLoad:
    """A ledger whose actors each hold as many leases as they may, and finish them in turn."""

    def __init__(self, num_actors: int, groups_per_batch: int = 128) -> None:
        eta = 2 * MAX_LEASES * num_actors // groups_per_batch + 8
        window = 4 * num_actors + 4096
        lag = LagRule.from_settings(max_lag=None, eta=eta, window=window, groups_per_batch=groups_per_batch)
        self.ledger = Ledger(
            LedgerSettings(lag=lag, group_size=2, limits=Limits(vocab_size=100), dedupe_window=8192, dead_after_s=1e9),
            run_id="bench", learner_epoch=1, run_seed=0, sampling=Sampling(),
            prompts=PromptStream(1000, seed=0, record=lambda index: b"{}"),
        )
        _publish(self.ledger)
        self.seqs = [1] * num_actors
        self.leases: deque[tuple[int, Lease]] = deque()
        self.seconds = dict.fromkeys(("accept", "installed", "order", "grant", "cut", "trained", "acks"), 0.0)
        self.num_grants = self.num_groups = 0
        for number in range(num_actors):
            self.ledger.hello(f"actor-{number}", Hello(
                1, 1, f"actor-{number}", number + 1, None, "fake", "bench", MAX_LEASES, ("zmq",),
                (VersionRef(1, 0), bytes(16)), (), (), 1,
            ), 0.0)
            self.ledger.beat(f"actor-{number}", ActorHeartbeat(
                number + 1, 1, ActorState.RUNNING, MAX_LEASES, 0, VersionRef(1, 0), 0, (), 0, 0,
            ), 0.0)
        self._grant()

    def step(self) -> None:
        """One group arrives, and everything that the hub does after it."""
        number, lease = self.leases.popleft()
        group = Group(
            number + 1, self.seqs[number], lease.group_id, lease.attempt, Outcome.COMPLETE, ReturnReason.NONE, "",
            lease.sampling, tuple(_member(index, lease.min_version.version) for index in range(2)), {},
        )
        self.seqs[number] += 1
        frame, ledger = bytes(encode(group)), self.ledger
        newest = ledger.versions.newest_published
        if ledger.actors.get(f"actor-{number}").installed.version < newest:
            began = time.perf_counter()
            ledger.installed(f"actor-{number}", VersionRef(1, newest), True, 0.0)
            self._add("installed", began)
        began = time.perf_counter()
        result = ledger.accept(f"actor-{number}", group, frame, 0.0)
        self._add("accept", began)
        assert result.kind == "accepted", result
        began = time.perf_counter()
        batch = ledger.cut_batch(ledger.version)
        self._add("cut", began)
        if batch is not None:
            began = time.perf_counter()
            ledger.end_batch(StepTaken(ledger.version + 1, False))
            _publish(ledger)
            self._add("trained", began)
        self._grant()
        self.num_groups += 1
        if self.num_groups % 64 == 0:
            began = time.perf_counter()
            for actor_id in ledger.acks_due():
                ledger.take_acks(actor_id)
            self._add("acks", began)

    def _grant(self) -> None:
        """Plans and grants, as the hub's handler does after every event."""
        granted = True
        while granted:
            granted = False
            began = time.perf_counter()
            order = self.ledger.grant_order()
            self._add("order", began)
            for actor_id in order:
                began = time.perf_counter()
                leases = self.ledger.grant(actor_id, 0.0)
                self._add("grant", began)
                self.num_grants += bool(leases)
                granted = granted or bool(leases)
                self.leases.extend((int(actor_id.removeprefix("actor-")), lease) for lease in leases)

    def _add(self, part: str, began: float) -> None:
        self.seconds[part] += time.perf_counter() - began


def _publish(ledger: Ledger) -> None:
    ledger.publish(Manifest(ledger.versions.ref, None, bytes(16), 0, (), bytes(16)))


def _member(index: int, version: int) -> Member:
    return Member(index, 0, pack_ids([1]), pack_ids([2, 3]), pack_logprobs([-0.5, -0.5]), ((0, 2),),
                  (Span(1, version, 0, 2),), (Turn(0, 2, 1.0),), float(index), {}, "stop")


def cost(num_actors: int, num_groups: int) -> dict[str, float]:
    """Microseconds a group by part, and in all, and a grant."""
    load = LedgerLoad(num_actors)
    for _ in range(num_actors):
        load.step()  # first leases over: from here on it is a steady state
    load.seconds = dict.fromkeys(load.seconds, 0.0)
    load.num_grants = load.num_groups = 0
    for _ in range(num_groups):
        load.step()
    parts = {f"{part}_us": 1e6 * spent / load.num_groups for part, spent in load.seconds.items()}
    per_grant = 1e6 * (load.seconds["grant"] + load.seconds["order"]) / max(1, load.num_grants)
    return {"group_us": sum(parts.values()), "grant_us": per_grant, **parts}
