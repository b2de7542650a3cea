"""The ledger under everything at once: deaths, partitions, losses, repeats, late weights, restarts, in any order.

Run one schedule again with STREAMRL_SEED=<the seed that a failure prints>.
"""

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, note, seed
from hypothesis import settings as budget
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from learner.hub.ledger.ledger import LedgerSettings
from tests.unit.hub.factories import settings
from tests.unit.hub.simulator import FAULTS, MOVES, SHAPES, World
from tests.unit.hub.survival import check_restored

SEED = int(os.environ.get("STREAMRL_SEED", "20"))
NUM_WALKS, FEW_WALKS = int(os.environ.get("STREAMRL_NUM_WALKS", "400")), 60
NAMES = st.sampled_from(["a0", "a1", "a2"])


@st.composite
def ledger_settings(draw: st.DrawFn):
    groups_per_batch = draw(st.sampled_from([1, 2, 3]))
    eta = draw(st.sampled_from([0, 1, 2]))
    window = draw(st.sampled_from([0, 1, groups_per_batch, 2 * groups_per_batch]))
    waits = window == 0 and draw(st.booleans())
    steps = draw(st.sampled_from([1, 1, 2, 4]))
    default = steps * (eta + -(-window // groups_per_batch) + 1) - 1
    return settings(
        groups_per_batch=groups_per_batch, group_size=draw(st.sampled_from([1, 2, 3])), eta=eta, window=window,
        steps_per_batch=steps, max_lag=draw(st.sampled_from([default, default, steps * (eta + 1) - 1])),
        max_attempts=draw(st.sampled_from([2, 3])),
        on_stale=draw(st.sampled_from(["reissue", "drop"])),
        mode="wait" if waits else draw(st.sampled_from(["drop", "drop", "mask_old_tokens", "reweight"])),
        group_policy=draw(st.sampled_from(["reissue_missing", "reissue_missing", "reissue_whole", "accept_partial"])),
        min_members=1, lease_ttl_s=20.0, group_deadline_s=draw(st.sampled_from([0.0, 15.0])),
    )


WORK = st.lists(st.tuples(NAMES, st.sampled_from(MOVES), st.integers(0, 5)), min_size=6, max_size=18)


class LedgerMachine(RuleBasedStateMachine):
    """Rules are stretches of ordinary work and single faults between them; invariants are the promises of `World`.

    Work is most of what happens: with faults as frequent as work no batch would ever be trained, and every promise
    would hold for want of an occasion. This test is the one that shrinks; the walks below have the volume.
    """

    reached: Counter[str] = Counter()

    @initialize(chosen=ledger_settings(), with_filter=st.booleans(), late=st.booleans())
    def start(self, chosen, with_filter, late):
        note(f"STREAMRL_SEED={SEED} {chosen}")
        self.world = World(chosen, with_filter=with_filter, publishes_late=late)
        for name in ("a0", "a1", "a2"):
            self.world.join(name)

    @rule(moves=WORK)
    def work(self, moves):
        for name, move, pick in moves:
            self.world.move(name, move, pick)
            self.world.check()

    @rule(moves=WORK, shapes=st.lists(st.sampled_from(SHAPES), min_size=3, max_size=3))
    def work_with_mishaps(self, moves, shapes):
        for i, (name, move, pick) in enumerate(moves):
            self.world.move(name, move, pick, shapes[i % 3])
            self.world.check()

    @rule(fault=st.sampled_from(FAULTS), name=NAMES, pick=st.integers(0, 5))
    def something_happens(self, fault, name, pick):
        self.world.fault(fault, name, pick)

    @rule(seconds=st.sampled_from([1.0, 4.0, 25.0]))
    def time_passes(self, seconds):
        self.world.tick(seconds)

    @invariant()
    def every_promise_holds(self):
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def log_and_checkpoint_give_the_live_ledger(self):
        if hasattr(self, "world"):
            check_restored(self.world)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.reached.update({name: int(count) for name, count in self.world.seen().items()})
        self.world.behave(num_batches=2)


FLOORS = {
    "num_groups_trained": 500, "num_restarts": 50, "num_repeats": 100, "num_leases_reissued": 200,
    "num_duplicates_dropped": 20, "num_rejected_stale": 5, "num_groups_stale": 20,
    "num_groups_dropped": 50, "num_groups_filtered": 20, "num_groups_quarantined": 20, "num_groups_partial": 5,
    "num_evictions": 50, "num_leases_expired": 5, "num_members_aborted": 20, "num_durable": 100,
    "num_lags_at_the_bound": 50, "lost_on_crash": 20, "num_lost_records": 100, "num_trained_again": 2,
}
"""How often each occasion must come up in 400 walks: a schedule that trains nothing proves nothing."""


def random_settings(rng: Random, tight: bool) -> LedgerSettings:
    """The same choices as `ledger_settings`, from a plain generator; `tight` invites groups to outlive max_lag."""
    groups_per_batch, eta = rng.choice([1, 2, 3]), rng.choice([1, 1, 2] if tight else [0, 1, 2])
    window = 2 * groups_per_batch if tight else rng.choice([0, 1, groups_per_batch, 2 * groups_per_batch])
    steps = rng.choice([1, 1, 2, 4])
    default, least = steps * (eta + -(-window // groups_per_batch) + 1) - 1, steps * (eta + 1) - 1
    return settings(
        groups_per_batch=groups_per_batch, group_size=rng.choice([1, 2, 3]), eta=eta, window=window,
        steps_per_batch=steps, max_lag=least if tight else rng.choice([default, default, least]),
        max_attempts=rng.choice([2, 3]),
        on_stale=rng.choice(["reissue", "drop"]),
        mode=rng.choice(["drop", "drop", "mask_old_tokens", "reweight", *(["wait"] * 4 if window == 0 else [])]),
        group_policy=rng.choice(["reissue_missing", "reissue_missing", "reissue_whole", "accept_partial"]),
        min_members=1, lease_ttl_s=20.0, group_deadline_s=rng.choice([0.0, 15.0]),
    )


def walk(number: int, num_events: int) -> World:
    """One schedule, a pure function of its number: mostly work, and every so often a fault."""
    rng = Random(f"{SEED}/{number}")
    tight = number % 3 == 0
    world = World(random_settings(rng, tight), with_filter=rng.random() < 0.5, publishes_late=rng.random() < 0.3)
    names = ["a0", "a1", "a2"]
    fault_rate = 0.03 if tight else rng.choice([0.05, 0.15, 0.3])
    youngest_first = tight or rng.random() < 0.4  # old groups are overtaken as often as the window allows
    for name in names:
        world.join(name)
    for event in range(num_events):
        if rng.random() < fault_rate:
            world.fault(rng.choice(FAULTS), rng.choice(names), rng.randrange(6))
        elif rng.random() < 0.1:
            world.tick(rng.choice([0.5, 1.0, 2.0, 4.0]))
        else:
            shape = rng.choice(SHAPES) if rng.random() < 0.3 else "whole"
            pick = -1 if youngest_first and rng.random() < 0.9 else rng.randrange(6)
            world.move(rng.choice(names), rng.choice(MOVES), pick, shape)
        world.check()
        if event % 40 == 39:
            check_restored(world)
    return world


@pytest.mark.parametrize("num_walks", [FEW_WALKS, NUM_WALKS], ids=["few", "many"])
def test_every_promise_holds_on_long_random_walks_that_reach_every_kind_of_trouble(num_walks):
    reached: Counter[str] = Counter()
    for number in range(num_walks):
        try:
            world = walk(number, num_events=400)
            reached.update({name: int(count) for name, count in world.seen().items()})
            world.behave(num_batches=2)
        except AssertionError as error:
            raise AssertionError(f"STREAMRL_SEED={SEED}, walk {number}: {error}") from error

    short = {name: reached[name] for name, floor in FLOORS.items() if reached[name] < floor * num_walks / 400}
    assert not short, f"the walks never got to these often enough: {short}"


@pytest.mark.parametrize("num_schedules", [40, 100], ids=["few", "many"])
def test_every_promise_holds_under_any_schedule_and_batches_come_when_everybody_behaves(num_schedules):
    print(f"STREAMRL_SEED={SEED}")
    profile = budget(
        max_examples=num_schedules, stateful_step_count=25, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    LedgerMachine.reached.clear()

    run_state_machine_as_test(seed(SEED)(LedgerMachine), settings=profile)

    assert LedgerMachine.reached["num_groups_trained"] >= num_schedules / 2
