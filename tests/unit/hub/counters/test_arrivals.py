"""What actors deliver is measured before age and filters decide about it; what they spend time on is added up."""

import pytest
from msgspec.structs import replace

from learner.hub.ledger.tables.filters import zero_std
from learner.hub.observers.counters import ActorLoads, Arrival, Arrivals
from streamrl.messages import EVAL_BIT, NUM_FAILED_EPISODES, Group, MemberStatus, Outcome, ReturnReason, Sampling
from tests.unit.hub.factories import hello_of, joined, make_ledger, member


def group(*rewards: float, group_id: int = 0, num_failed: int = 0) -> Group:
    members = [member(i, [(1, 0)], reward=x, scores={"score": 10 * x}) for i, x in enumerate(rewards)]
    failed = [member(len(rewards) + i, [(1, 0)], status=MemberStatus.ABORTED) for i in range(num_failed)]
    return Group(0, 0, group_id, 0, Outcome.COMPLETE, ReturnReason.NONE, "", Sampling(), tuple(members + failed),
                 {NUM_FAILED_EPISODES: float(num_failed)})


def test_sums_are_over_the_training_trajectories_that_came_through():
    arrivals = Arrivals()
    arrivals.group(Arrival("a", group(1.0, -2.0), 100))
    arrivals.group(Arrival("a", group(0.5, num_failed=1), 50, accepted=False))
    arrivals.group(Arrival("a", group(7.0, group_id=EVAL_BIT | 3), 1000))

    found = arrivals.metrics()
    tokens = sum(end - begin for begin, end in member(0, [(1, 0)]).mask)

    assert (found["arrived_trajectories"], found["arrived_reward"], found["arrived_score"]) == (3, -0.5, -5.0)
    assert (found["arrived_reward_squared"], found["arrived_bytes"]) == (5.25, 150)
    assert (found["arrived_tokens"], found["arrived_failed_groups"]) == (3 * tokens, 1)


def test_parts_of_rewards_and_cut_answers_are_counted_before_any_filter():
    arrivals = Arrivals()
    one = replace(member(0, [(1, 0)], scores={"score": 1.0, "form": 0.5}), finish="length")
    arrivals.group(Arrival("a", replace(group(), members=(one, replace(one, finish="stop"))), 1))
    assert (arrivals.metrics()["arrived_part_form"], arrivals.metrics()["arrived_cut"]) == (1.0, 1)
    assert arrivals.metrics()["arrived_temperature"] == 2 * Sampling().temperature
    arrivals.group(Arrival("a", replace(group(), members=(replace(one, sampling=Sampling(temperature=0.5)),)), 1))
    assert arrivals.metrics()["arrived_temperature"] == 2 * Sampling().temperature + 0.5


def test_groups_with_equal_rewards_are_counted_before_the_filter_drops_them():
    ledger = make_ledger(keep_group=zero_std())
    actor = joined(ledger, "a")
    for lease, rewards in zip(actor.ask(), [[1.0, 1.0], [0.0, 1.0], [2.0, 2.0]], strict=False):
        assert actor.finish(lease, rewards=rewards).kind == "accepted"
    counts = ledger.counters()

    assert (counts["num_groups_completed"], counts["num_groups_zero_std"], counts["num_groups_filtered"]) == (3, 2, 2)
    assert counts["num_groups_queued"] == 1


def test_the_time_of_actors_is_added_up_as_they_come_and_go():
    loads = ActorLoads()
    loads.joined(hello_of("a"), is_new=True)
    loads.beat("a", {"busy_s": 0.0}, 0.0)  # still loading
    loads.beat("a", {"up_s": 2.0, "idle_s": 1.0, "env_step_p95_s": 0.3}, 0.0)
    loads.beat("b", {"up_s": 90.0, "idle_s": 90.0, "env_step_p95_s": 0.1}, 0.0)  # known to the learner before this one
    use = {"host_cpu_percent": 90.0, "host_memory_percent": 40.0, "rss_bytes": 5e9, "gpu_percent": 70.0}
    loads.beat("b", {"up_s": 93.0, "idle_s": 91.0, "env_step_p95_s": 0.7, "given_back_bytes": 3e9, **use}, 0.0)
    found = loads.metrics()
    names = ("cpu_percent", "memory_percent", "rss_bytes", "gpu_percent", "given_back_bytes")
    assert [found[f"actor_{name}"] for name in names] == [90.0, 40.0, 5e9, 70.0, 3e9]
    assert (found["actor_s"], found["actor_idle_s"], found["env_step_p95_s"]) == (5.0, 2.0, 0.7)

    loads.remove("b")
    loads.joined(hello_of("a"), is_new=True)  # restarted: its counters begin again
    loads.beat("a", {"up_s": 1.0, "idle_s": 0.0, "env_step_p95_s": 0.2}, 0.0)
    loads.remove("a")
    found = loads.metrics()
    assert (found["actor_s"], found["actor_idle_s"], found["env_step_p95_s"]) == (6.0, 2.0, pytest.approx(0.2))
