"""What would N actors do to my lag? The real ledger on virtual time, with drawn latencies and failures.

Nothing waits: a heap of events moves the clock, and the ledger, the lag rule and their settings are the product's. What
is modeled is the rest: how long a group takes (log-normal), an optimizer step, an install, how often an actor dies.
`--measure` runs the same numbers for real, a hub with actors that wait instead of generating, and compares.

Run: python -m bench.simulate --actors 1000 --group-s 20 --step-s 4 staleness.eta=2 rollout.num_prompts_per_step=512
     python -m bench.simulate --actors 64 --group-s 0.5 --step-s 0.2 --measure
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bench.record import record
from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub_client.settings import ledger_settings, wire_sampling
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.messages import (
    ActorHeartbeat,
    ActorState,
    Group,
    Hello,
    Lease,
    Manifest,
    Member,
    Outcome,
    ReturnReason,
    Span,
    Turn,
    VersionRef,
)
from streamrl.messages.codec import encode, pack_ids, pack_logprobs
from streamrl.stream.records import StepTaken

VOCAB_SIZE = 100
_IDS, _LOGPROBS = pack_ids([1, 2]), pack_logprobs([-0.5, -0.5])


@dataclass(frozen=True, slots=True)
class World:
    """Distributions to draw from. Seconds are means; `sigma` is the spread of a group's log duration."""

    num_actors: int
    max_leases: int = 1
    group_s: float = 20.0
    sigma: float = 0.5
    step_s: float = 4.0
    install_s: float = 0.5
    mean_life_s: float = math.inf
    restart_s: float = 10.0

    def draw_group_s(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.group_s) - self.sigma**2 / 2, self.sigma)


@dataclass(slots=True)
class SimActor:
    """The simulated network's state of one actor."""

    name: str
    incarnation: int = 0
    seq: int = 0
    installed: VersionRef = VersionRef(1, 0)
    leases: dict[tuple[int, int], VersionRef] = field(default_factory=dict)  # lease -> version at its beginning


class Simulation:
    """One run of a config in a world."""

    def __init__(self, config: Config, world: World, seed: int = 0) -> None:
        settings = ledger_settings(config, VOCAB_SIZE)
        self.ledger = Ledger(
            settings, run_id="simulation", learner_epoch=1, run_seed=seed, sampling=wire_sampling(
                config.rollout.train.sampling),
            prompts=PromptStream(1 << 20, seed=seed, record=lambda index: b"{}"),
        )
        self._publish(VersionRef(1, 0))
        self.world, self.rng, self.now = world, random.Random(seed), 0.0
        self.group_size, self.dead_after_s = settings.group_size, settings.dead_after_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._training, self._incarnations = False, count(1)
        self.busy_s, self.lags = 0.0, Counter[int]()
        self.batches: list[float] = []
        self.actors = {f"actor-{number}": SimActor(f"actor-{number}") for number in range(world.num_actors)}
        for actor in self.actors.values():
            self._join(actor)

    def run(self, seconds: float, warm_s: float) -> dict[str, Any]:
        """So many seconds of virtual time after the warm-up; what they were like."""
        self._advance(warm_s)
        before, busy_s, first = self.ledger.counters(), self.busy_s, len(self.batches)
        self.lags.clear()
        self._advance(warm_s + seconds)
        after = self.ledger.counters()
        moved = {key: after[key] - before[key] for key in before}
        return summary(
            seconds, len(self.batches) - first, self.ledger.lag.rule.groups_per_batch, self.lags, moved,
        ) | {"learner_busy": round((self.busy_s - busy_s) / seconds, 3)}

    def _advance(self, until: float) -> None:
        self._serve()
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._serve()
        self.now = until

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), action))

    def _serve(self) -> None:
        """Plans and grants, as the hub does after every event."""
        if not self._training:
            self._train()
        granted = True
        while granted:
            granted = False
            for name in self.ledger.grant_order():
                leases = self.ledger.grant(name, self.now)
                for lease in leases:
                    self._begin(self.actors[name], lease)
                granted = granted or bool(leases)

    # --- learner --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        ledger = self.ledger
        batch = ledger.cut_batch(ledger.version)
        if batch is None:
            return
        self.lags.update(member.head_lag for group in batch for member in group.members)
        self._training = True
        self.busy_s += self.world.step_s
        self._at(self.world.step_s, self._trained)

    def _publish(self, ref: VersionRef) -> None:
        self.ledger.publish(Manifest(ref, None, bytes(16), 0, (), bytes(16)))

    def _trained(self) -> None:
        self._training = False
        ref = VersionRef(1, self.ledger.version + 1)
        self.ledger.end_batch(StepTaken(ref.version, False))
        self._publish(ref)
        self.batches.append(self.now)
        for actor in self.actors.values():
            self._at(self.rng.expovariate(1 / self.world.install_s) if self.world.install_s else 0.0,
                     lambda actor=actor: self._install(actor, ref))

    def _install(self, actor: SimActor, ref: VersionRef) -> None:
        if ref > actor.installed:
            actor.installed = ref
            self.ledger.installed(actor.name, ref, True, self.now)

    # --- actors -----------------------------------------------------------------------------------------------------

    def _join(self, actor: SimActor) -> None:
        ledger, most = self.ledger, self.world.max_leases
        actor.incarnation, actor.seq = next(self._incarnations), 0
        actor.leases.clear()
        actor.installed = VersionRef(1, ledger.version)
        ledger.hello(actor.name, Hello(
            1, 1, actor.name, actor.incarnation, None, "simulated", "bench", most, ("zmq",),
            (actor.installed, bytes(16)), (), (), 1,
        ), self.now)
        ledger.beat(actor.name, ActorHeartbeat(
            actor.incarnation, 1, ActorState.RUNNING, most, 0, actor.installed, 0, (), 0, 0,
        ), self.now)
        if self.world.mean_life_s < math.inf:
            life = actor.incarnation
            self._at(self.rng.expovariate(1 / self.world.mean_life_s), lambda: self._die(actor, life))

    def _die(self, actor: SimActor, incarnation: int) -> None:
        """Silences the actor; the hub notices later, and later still it is back."""
        actor.leases.clear()
        self._at(self.dead_after_s, lambda: self._evicted(actor, incarnation))
        self._at(max(self.dead_after_s, self.world.restart_s), lambda: self._join(actor))

    def _evicted(self, actor: SimActor, incarnation: int) -> None:
        if actor.incarnation == incarnation:
            self.ledger.evict(actor.name, self.now)

    def _begin(self, actor: SimActor, lease: Lease) -> None:
        actor.leases[lease.ref] = actor.installed
        life = actor.incarnation
        self._at(self.world.draw_group_s(self.rng), lambda: self._finish(actor, life, lease))

    def _finish(self, actor: SimActor, incarnation: int, lease: Lease) -> None:
        began = actor.leases.pop(lease.ref, None)
        if began is None or actor.incarnation != incarnation:
            return
        actor.seq += 1
        spans = (Span(1, began.version, 0, 1), Span(1, actor.installed.version, 1, 2))
        group = Group(
            incarnation, actor.seq, lease.group_id, lease.attempt, Outcome.COMPLETE, ReturnReason.NONE, "",
            lease.sampling, tuple(
                Member(index, 0, _IDS, _IDS, _LOGPROBS, ((0, 2),), spans, (Turn(0, 2, 1.0),), float(index), {}, "stop")
                for index in lease.members
            ), {},
        )
        self.ledger.accept(actor.name, group, bytes(encode(group)), self.now)


def summary(
    seconds: float, num_batches: int, batch: int, lags: Counter[int], moved: dict[str, float]
) -> dict[str, Any]:
    """The numbers that simulation and measurement are compared by; `lags` are of trajectories' oldest tokens."""
    total = max(1, lags.total())
    ordered = sorted(lags.elements())
    return {
        "groups_per_s": round(num_batches * batch / seconds, 3), "batches": num_batches,
        "lag_mean": round(sum(lag * num for lag, num in lags.items()) / total, 3),
        "lag_p99": ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0, "lag_max": max(lags, default=0),
        "stale": moved["num_groups_stale"], "reissued": moved["num_leases_reissued"],
        "dropped": moved["num_groups_dropped"],
    }


def measure(config_words: Sequence[str], world: World, seconds: float, warm_s: float) -> dict[str, Any]:
    """The same world with a real hub, sockets, and actors that wait instead of generating; nothing dies."""
    from bench.plane.run_hub import Plane, Sizes

    sizes = Sizes(world.num_actors, group_size=2, num_tokens=4, max_leases=world.max_leases,
                  group_s=world.group_s, sigma=world.sigma, install_s=world.install_s, words=tuple(config_words))
    with Plane(sizes) as plane:
        plane.start_fleet()
        plane.wait_for_actors()
        plane.train_slowly(warm_s, world.step_s)
        before = plane.counters()
        began = time.monotonic()
        num_batches, lags = plane.train_slowly(seconds, world.step_s)
        spent = time.monotonic() - began
        after = plane.counters()
        moved = {key: after[key] - before.get(key, 0.0) for key in after}
        return summary(spent, num_batches, plane.config.rollout.num_prompts_per_step, lags, moved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=64)
    parser.add_argument("--max-leases", type=int, default=1)
    for name, default in (("group-s", 20.0), ("sigma", 0.5), ("step-s", 4.0), ("install-s", 0.5),
                          ("mean-life-s", math.inf), ("restart-s", 10.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--seconds", type=float, default=0.0, help="of virtual time; 100 steps if 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("words", nargs="*", help="settings of the run, as `streamrl launch` takes them")
    arguments = parser.parse_args()
    world = World(arguments.actors, arguments.max_leases, arguments.group_s, arguments.sigma, arguments.step_s,
                  arguments.install_s, arguments.mean_life_s, arguments.restart_s)
    words = ["experiment=quickstart", "trainer.num_steps=1000000", "rollout.num_responses_per_prompt=2",
             *arguments.words]
    seconds = arguments.seconds or 100 * world.step_s
    warm_s = 5 * world.group_s
    began = time.monotonic()
    found: dict[str, Any] = {
        "world": {**{name: getattr(world, name) for name in World.__slots__}, "mean_life_s": str(world.mean_life_s)},
        "words": arguments.words, "seconds": seconds,
        "simulated": Simulation(load_config(words), world, arguments.seed).run(seconds, warm_s),
        "simulation_s": round(time.monotonic() - began, 2),
    }
    if arguments.measure:
        found["measured"] = measure(words, world, seconds, warm_s)
        for key in ("groups_per_s", "lag_mean"):  # of both, how far the measurement lies from the simulation
            simulated, measured = found["simulated"][key], found["measured"][key]
            apart = abs(measured / simulated - 1)
            record(f"simulate.{key}.{world.num_actors}", apart, "share", "lower", [apart], found,
                   goal={"id": "simulate", "op": "<=", "value": 0.1}, seed=arguments.seed)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
