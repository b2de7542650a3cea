"""Counters of the hub are cumulative; a row holds one step."""

from collections import Counter

import pytest

from learner.record.hub_counts import HubCounts
from streamrl.metrics.names import METRICS
from streamrl.metrics.ranking import Objective
from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.sinks import plain_line
from streamrl.report.curves import Curve, noisy
from streamrl.report.headline import tiles


def occurred(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if value}


def test_a_row_tells_what_was_dropped_since_the_row_before_and_why():
    counts = HubCounts()
    first = counts.since_last({"num_dropped_zero_std": 3.0, "num_groups_stale": 1.0, "num_dropped_attempts": 0.0})
    second = counts.since_last({
        "num_dropped_zero_std": 8.0, "num_groups_stale": 1.0, "num_dropped_accuracy_range": 2.0,
        "num_malformed_logprob_finite": 1.0,
    })

    assert {key for key in METRICS if key.startswith("dropped/")} - {"dropped/*"} <= first.keys()
    assert occurred(first) == {"dropped/zero_std": 3.0, "dropped/stale": 1.0, "group/stale_fraction": 1.0}
    assert occurred(second) == {"dropped/zero_std": 5.0, "dropped/accuracy": 2.0, "dropped/nonfinite_logprob": 1.0}


def test_means_are_of_what_came_in_this_step_alone():
    counts = HubCounts()
    came = {"arrived_trajectories": 4.0, "arrived_reward": -2.0, "arrived_reward_squared": 4.0, "arrived_score": 8.0,
            "arrived_tokens": 40.0, "arrived_bytes": 400.0}
    later = {"arrived_trajectories": 6.0, "arrived_reward": -5.0, "arrived_reward_squared": 9.0, "arrived_score": 8.0,
             "arrived_tokens": 100.0, "arrived_bytes": 700.0}

    first, second, third = (counts.since_last(counters) for counters in (came, later, later))

    assert (first["reward/mean"], first["score/mean"], first["length/dispatched"]) == (-0.5, 2.0, 10.0)
    assert first["reward/std"] == pytest.approx((4.0 / 4 - 0.5**2) ** 0.5)
    assert (second["reward/mean"], second["score/mean"], second["length/dispatched"]) == (-1.5, 0.0, 30.0)
    assert second["throughput/wire_bytes_per_token"] == 5.0
    more = {**later, "arrived_trajectories": 8.0, "arrived_cut": 1.0, "arrived_part_the format": 3.0,
            "arrived_temperature": 1.4}
    fourth = counts.since_last(more)
    assert (fourth["length/dispatched_truncated_fraction"], fourth["arrived/the_format"]) == (0.5, 1.5)
    assert fourth["rollout/temperature"] == 0.7
    assert "reward/mean" not in third and "length/dispatched" not in third


def test_a_step_with_one_answer_weighs_one_answer_in_what_a_run_is_judged_by():
    counts, total, rewards = HubCounts(), Counter(), [0.0] * 300 + [1.0] * 255 + [0.0]
    rows = []
    for part in ([0.0] * 300, [1.0] * 255, [0.0]):
        total.update(arrived_trajectories=len(part), arrived_reward=sum(part), arrived_reward_squared=sum(part),
                     arrived_score=2 * sum(part), arrived_tokens=len(part), arrived_bytes=len(part))
        rows.append({"step": len(rows) + 1, **counts.since_last({name: float(one) for name, one in total.items()})})

    assert [(row["reward/mean"], row["reward/num"]) for row in rows] == [(0.0, 300), (1.0, 255), (0.0, 1)]
    assert rows[-1]["reward/recent"] == 255 / 256 == rows[-1]["score/recent"] / 2
    assert rows[1]["reward/recent"] == sum(rewards[:555]) / 555  # a row is taken whole
    assert "reward/recent" not in counts.since_last({name: float(one) for name, one in total.items()})

    judged = Objective("reward/mean")
    record = RunRecord(rows, name="r")
    assert judged.value(record) == rows[-1]["reward/recent"] and judged.intermediate(rows)[-1] == (3, 255 / 256)
    assert "reward 0.996" in plain_line(rows[-1])
    assert record.judged("reward/mean")[1][-1] == 255 / 256 and record.weights("reward/mean") == [300, 255, 1]
    uneven = [{"step": n, "reward/mean": n % 2, "reward/num": 1 if n % 2 else 255} for n in range(1, 41)]
    assert "<b>0.00391</b>" in tiles(RunRecord(uneven, name="r"))
    (_, smoothed) = noisy(Curve("r", range(40), [0.0, 1.0] * 20, weights=[1.0, 3.0] * 20))
    assert smoothed.ys[20] == pytest.approx(0.75, abs=0.2) and smoothed.ys[20] > 0.5


def test_shares_of_groups_are_of_all_that_ended_in_the_step():
    row = HubCounts().since_last(
        {"num_groups_completed": 10.0, "num_groups_zero_std": 4.0, "num_groups_filtered": 5.0, "num_groups_stale": 2.0,
         "arrived_failed_groups": 1.0}, num_trained=8.0,
    )

    shares = [row[f"group/{name}_fraction"] for name in ("zero_std", "filtered", "stale", "failed")]
    assert shares == pytest.approx([4 / 10, 5 / 16, 2 / 16, 1 / 16])


def test_shares_of_the_actors_time_are_of_what_they_told_since_the_row_before():
    counts = HubCounts()
    counts.since_last({"actor_s": 10.0, "actor_idle_s": 10.0, "actor_starved_s": 10.0, "actor_paused_s": 0.0,
                       "episode_generation_s": 0.0, "episode_environment_s": 0.0})
    later = {"actor_s": 14.0, "actor_idle_s": 12.0, "actor_starved_s": 11.0, "actor_paused_s": 1.0,
             "episode_generation_s": 6.0, "episode_environment_s": 2.0}
    row = counts.since_last(later)

    assert (row["time/actor_idle_fraction"], row["time/actor_starved_fraction"]) == (0.5, 0.25)
    assert (row["time/actor_install_fraction"], row["time/environment_fraction"]) == (0.25, 0.25)
    assert "time/actor_idle_fraction" not in counts.since_last(later)


def test_a_restarted_hub_counts_from_nothing():
    counts = HubCounts()
    counts.since_last({"num_dropped_zero_std": 9.0})

    assert occurred(counts.since_last({"num_dropped_zero_std": 2.0})) == {"dropped/zero_std": 2.0}


def test_the_first_row_of_a_resumed_run_does_not_repeat_what_its_checkpoint_had_counted():
    resumed = HubCounts({"num_dropped_zero_std": 9.0})

    assert occurred(resumed.since_last({"num_dropped_zero_std": 11.0})) == {"dropped/zero_std": 2.0}
