"""Counters of the hub are cumulative; a row holds one step."""

import pytest

from learner.record.hub_counts import HubCounts


def test_a_row_tells_what_was_dropped_since_the_row_before_and_why():
    counts = HubCounts()
    first = counts.since_last({"num_dropped_zero_std": 3.0, "num_groups_stale": 1.0, "num_dropped_attempts": 0.0})
    second = counts.since_last({
        "num_dropped_zero_std": 8.0, "num_groups_stale": 1.0, "num_dropped_accuracy_range": 2.0,
        "num_malformed_logprob_finite": 1.0,
    })

    assert first == {"dropped/zero_std": 3.0, "dropped/stale": 1.0}
    assert second == {
        "dropped/zero_std": 5.0, "dropped/stale": 0.0, "dropped/accuracy": 2.0, "dropped/nonfinite_logprob": 1.0
    }


def test_the_length_of_what_came_is_of_this_step_alone():
    counts = HubCounts()
    assert counts.since_last({"num_members_accepted": 4.0, "num_tokens_accepted": 40.0})["length/dispatched"] == 10.0
    row = counts.since_last({"num_members_accepted": 6.0, "num_tokens_accepted": 100.0})
    assert row["length/dispatched"] == pytest.approx(30.0)
    assert "length/dispatched" not in counts.since_last({"num_members_accepted": 6.0, "num_tokens_accepted": 100.0})


def test_a_restarted_hub_counts_from_nothing():
    counts = HubCounts()
    counts.since_last({"num_dropped_zero_std": 9.0})

    assert counts.since_last({"num_dropped_zero_std": 2.0}) == {"dropped/zero_std": 2.0}
