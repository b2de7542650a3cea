"""Log-ratios, row statistics, effective sample size, trace length."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamrl.algorithms as alg
from bench import pieces
from tests.kit.each import each

from . import slow
from .rows import action_lists, random_rows

SEEDS = range(4)


@each("seed", SEEDS)
def test_log_ratios_are_clamped_differences(seed):
    rows = random_rows(seed)
    rows = rows.change(policy=rows.policy * 30)

    result = alg.log_ratios(rows.behavior, rows.policy, rows.mask, bound=5.0)

    for i, j in rows.mask.nonzero().tolist():
        expected = max(-5.0, min(5.0, float(rows.policy[i, j] - rows.behavior[i, j])))
        assert float(result[i, j]) == pytest.approx(expected)


def test_the_clamp_hides_infinities_but_never_nan():
    """Hence the batch is assembled from finite log-probs only: +20 here would look like an ordinary token."""
    behavior = torch.tensor([[-1.0, float("-inf"), float("nan")]])

    log_ratios = alg.log_ratios(behavior, torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool))

    assert log_ratios[0, :2].tolist() == [0.0, 20.0] and log_ratios[0, 2].isnan()


@each("seed", SEEDS)
def test_row_statistics_are_their_definitions(seed):
    rows = random_rows(seed)

    stats = alg.sequence_stats(rows.log_ratios, rows.mask)

    for i, (log_ratios,) in enumerate(action_lists(rows, "log_ratios")):
        n = len(log_ratios)
        expected = {
            "num_tokens": n,
            "log_sum": sum(log_ratios),
            "log_mean": sum(log_ratios) / n if n else 0,
            "k2_sum": sum(x * x / 2 for x in log_ratios),
            "k2_max": max((x * x / 2 for x in log_ratios), default=0),
            "k3_mean": sum(math.exp(x) - x - 1 for x in log_ratios) / n if n else 0,
        }
        for name, value in expected.items():
            assert float(getattr(stats, name)[i]) == pytest.approx(value, abs=1e-12), name


def test_k3_keeps_its_digits_for_fresh_float32_data():
    log_ratios = torch.full((1, 4), 1e-4)

    k3 = float(alg.sequence_stats(log_ratios, torch.ones(1, 4, dtype=torch.bool)).k3_mean)

    assert k3 == pytest.approx(5e-9, rel=0.05)  # exp(ell) - ell - 1 in float32 is 0 or 1e-7


weight_lists = st.lists(st.floats(0.0, 1e8), min_size=1, max_size=20).filter(lambda ws: max(ws) > 1e-6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(weight_lists)
def test_ess_lies_in_0_1_and_is_its_definition(weights):
    ess = float(pieces.effective_sample_size(torch.tensor(weights, dtype=torch.float64)))

    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert 0 < ess <= 1 + 1e-12
    assert ess == pytest.approx(expected)


@pytest.mark.parametrize("weight", [1e-30, 1.0, 1e30])
def test_equal_weights_have_ess_1_whatever_their_size(weight):
    assert float(pieces.effective_sample_size(torch.full((5, 3), weight))) == pytest.approx(1.0)


def test_dropped_weights_do_not_count_as_zeros():
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])
    keep = torch.tensor([True, True, True, False])

    assert float(pieces.effective_sample_size(weights, keep)) == pytest.approx(1.0)
    assert float(pieces.effective_sample_size(weights)) == pytest.approx(0.75)


def test_ess_is_zero_when_nothing_is_kept_and_nan_when_a_weight_is():
    weights = torch.ones(3)

    assert float(pieces.effective_sample_size(weights, torch.zeros(3, dtype=torch.bool))) == 0
    assert float(pieces.effective_sample_size(torch.zeros(3))) == 0
    assert math.isnan(float(pieces.effective_sample_size(torch.tensor([1.0, float("nan")]))))


@each("seed", SEEDS)
def test_the_report_is_its_definitions(seed):
    rows = random_rows(seed)

    report = pieces.ess_report(rows.log_ratios, rows.mask, keep=rows.keep, cap=1.5)

    def ess(ws):
        return sum(ws) ** 2 / (len(ws) * sum(w * w for w in ws))

    kept = rows.mask & rows.keep
    lists = [rows.log_ratios[i][kept[i]].tolist() for i in range(kept.shape[0])]
    tokens = [math.exp(x) for log_ratios in lists for x in log_ratios]
    sequences = [math.exp(sum(log_ratios)) for log_ratios in lists if log_ratios]
    assert float(report.token) == pytest.approx(ess(tokens))
    assert float(report.sequence) == pytest.approx(ess(sequences))
    assert float(report.sequence_clipped) == pytest.approx(ess([min(w, 1.5) for w in sequences]))
    assert float(report.mean_token_weight) == pytest.approx(sum(tokens) / len(tokens))
    assert float(report.mean_sequence_weight) == pytest.approx(sum(sequences) / len(sequences))
    assert float(report.kept_fraction) == pytest.approx(int(kept.sum()) / int(rows.mask.sum()))


@each("seed", SEEDS)
@pytest.mark.parametrize("lam, c_bar, kappa, leak", [
    (1.0, 1.0, 1.0, 1.0), (0.9, 1.5, 1.0, 1.0), (1.0, 1.0, 4.0, 1.0), (0.9, 1.0, 2.0, 0.7), (1.0, 1.0, 1.0, 0.0),
])
def test_trace_length_is_its_double_sum(lam, c_bar, kappa, leak, seed):
    rows = random_rows(seed)

    fast = alg.trace_length(rows.log_ratios, rows.mask, lam=lam, c_bar=c_bar, trace_temperature=kappa, leak=leak)

    expected = [
        slow.trace_length(log_ratios, lam=lam, c_bar=c_bar, kappa=kappa, leak=leak)
        for (log_ratios,) in action_lists(rows, "log_ratios")
    ]
    assert fast.tolist() == pytest.approx(expected)
