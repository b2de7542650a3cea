"""The meter against a plain list of all observations."""

import json
import math

import numpy as np
import pytest

from streamrl.metrics.meter import Meter, percentile


def test_means_are_sums_over_counts_and_never_means_of_means():
    meter = Meter()

    meter.add("policy/loss", 0.5, weight=10)
    meter.add("policy/loss", 2.0, weight=30)

    assert meter.flush(7) == {"step": 7, "policy/loss": 1.625}  # a mean of means would be 1.25


def test_each_reduction_computes_its_statistic():
    meter = Meter()
    for value in (3.0, 9.0, 4.0):
        meter.add("dropped/stale", value)
        meter.add("ratio/max", value, weight=0.1)
        meter.add("run/version", value)

    row = meter.flush(1)

    assert (row["dropped/stale"], row["ratio/max"], row["run/version"]) == (16.0, 9.0, 4.0)


def test_std_and_effective_sample_size_follow_their_formulas_over_uneven_parts():
    rng = np.random.default_rng(5)
    values = np.exp(rng.normal(0, 0.4, size=100))
    meter = Meter()

    for value in values[:7]:
        meter.add("reward/std", float(value))
    meter.add_moments("reward/std", 93, values[7:].sum(), (values[7:] ** 2).sum())
    for value in values:
        meter.add("ess/token", float(value))

    row = meter.flush(1)
    assert row["reward/std"] == pytest.approx(values.std(), rel=1e-12)
    assert row["ess/token"] == pytest.approx(values.sum() ** 2 / (100 * (values**2).sum()), rel=1e-12)


def test_histograms_keep_integer_bins_and_give_percentiles():
    meter = Meter()
    meter.add_histogram("lag/token", {2: 50, 0: 49})
    meter.add("lag/token", 2, weight=0)
    meter.add("lag/token", 7)

    row = meter.flush(1)

    assert list(row["lag/token"].items()) == [(0, 49), (2, 50), (7, 1)]
    assert (row["lag/token_p50"], row["lag/token_p99"]) == (2, 2)
    assert json.loads(json.dumps(row))["lag/token"]["7"] == 1


def test_percentiles_agree_with_the_sorted_list():
    counts = {0: 3, 1: 1, 4: 5, 9: 2}
    flat = sorted(k for k, n in counts.items() for _ in range(n))

    for share in (0.01, 0.25, 0.5, 0.75, 0.99, 1.0):
        assert percentile(counts, share) == flat[math.ceil(share * len(flat)) - 1]


def test_drift_by_lag_is_a_weighted_mean_within_each_bin():
    meter = Meter()
    meter.add_at("drift/m2_by_lag", 3, 0.1, weight=1)
    meter.add_at("drift/m2_by_lag", 3, 0.4, weight=2)
    meter.add_at("drift/m2_by_lag", 0, 0.01, weight=5)

    assert meter.flush(1)["drift/m2_by_lag"] == pytest.approx({0: 0.01, 3: 0.3})


def test_values_that_are_not_finite_are_left_out_and_counted():
    meter = Meter()
    for value in (1.0, float("nan"), 3.0, float("inf")):
        meter.add("policy/loss", value)
    meter.add("lag/token", float("nan"))
    meter.add_at("drift/m2_by_lag", 1, float("nan"))

    assert meter.flush(1) == {"step": 1, "policy/loss": 2.0, "meter/num_nonfinite": 4.0}


def test_a_flushed_step_leaves_nothing_behind():
    meter = Meter()
    meter.add("policy/loss", 1.0)
    meter.add("lag/head", 2)
    meter.flush(1)

    assert meter.flush(2) == {"step": 2}


def test_programming_errors_are_refused():
    meter = Meter()
    with pytest.raises(KeyError, match="Unknown metric"):
        meter.add("policy/lost", 1.0)
    with pytest.raises(ValueError, match="weight -1"):
        meter.add("policy/loss", 1.0, weight=-1)
    with pytest.raises(ValueError, match="not an integer"):
        meter.add("lag/token", 1.5)
    with pytest.raises(ValueError, match="cannot feed"):
        meter.add("lag/token_p50", 1)
    with pytest.raises(ValueError, match="no moments"):
        meter.add_moments("policy/loss", 1, 1, 1)
    with pytest.raises(ValueError, match="no means by bin"):
        meter.add_at("lag/token", 1, 1.0)
    assert meter.flush(1) == {"step": 1}


def test_counters_of_the_hub_are_taken_under_their_own_names():
    meter = Meter()
    meter.add_all({"hub/num_groups_leased": 4.0, "hub/num_wire_errors_digest": 1.0})

    assert meter.flush(1) == {"step": 1, "hub/num_groups_leased": 4.0, "hub/num_wire_errors_digest": 1.0}


def test_ranks_merged_equal_one_meter_that_saw_everything():
    rng = np.random.default_rng(11)
    alone, ranks = Meter(), [Meter() for _ in range(3)]
    for i in range(300):
        for meter in (alone, ranks[i % 2]):  # the third rank sees nothing
            meter.add("policy/loss", float(i), weight=1 + i % 5)
            meter.add("dropped/stale", 1.0)
            meter.add("ratio/max", math.sin(i))
            meter.add("ess/token", 1.0 + 0.1 * math.cos(i))
            meter.add("reward/std", float(i % 7))
            meter.add("reward/format", i % 3)  # a family's key, known to no rank beforehand
            meter.add("lag/token", i % 4, weight=2)
            meter.add_at("drift/m2_by_lag", i % 3, 0.01 * i)
    rng.shuffle(ranks)

    merged = Meter()
    for meter in ranks:
        merged.merge(meter.totals())

    got, want = merged.flush(1), alone.flush(1)
    assert set(got) == set(want)
    for key in want:
        assert got[key] == pytest.approx(want[key], rel=1e-9), key


def test_of_several_ranks_the_last_value_of_the_first_one_is_kept():
    first, second = Meter(), Meter()
    first.add("run/version", 5)
    second.add("run/version", 9)
    second.add("policy/lr", 0.1)

    first.merge(second.totals())

    assert first.flush(1) == {"step": 1, "run/version": 5.0, "policy/lr": 0.1}
