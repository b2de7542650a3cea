"""Weights and masks between actor and learner, against their rules in loops."""

import math

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .rows import action_lists, on_rows, random_rows

SEEDS = range(5)


def per_row(rows, rule):
    """`rule(ell list) -> list` on every row."""
    return on_rows(rows, [rule(log_ratios) if log_ratios else [] for (log_ratios,) in action_lists(rows, "log_ratios")])


def s(log_ratios):
    return math.exp(max(-20, min(20, sum(log_ratios))))


def g(log_ratios):
    return math.exp(sum(log_ratios) / len(log_ratios))


WEIGHT_RULES = {
    "tis": (
        lambda r: alg.tis_weights(r.log_ratios, r.mask, cap=1.5, floor=0.5),
        lambda log_ratios: [min(max(math.exp(x), 0.5), 1.5) for x in log_ratios],
    ),
    "tis low": (
        lambda r: alg.tis_weights(r.log_ratios, r.mask, cap=0.8),
        lambda log_ratios: [min(math.exp(x), 0.8) for x in log_ratios],
    ),
    "seq_tis": (
        lambda r: alg.seq_tis_weights(r.log_ratios, r.mask, cap=1.5),
        lambda log_ratios: [min(s(log_ratios), 1.5)] * len(log_ratios),
    ),
}

KEEP_RULES = {
    "seq_mis": (lambda r: alg.seq_mis_keep(r.log_ratios, r.mask), lambda log_ratios: 0.5 <= s(log_ratios) <= 2.0),
    "geo": (
        lambda r: alg.geo_keep(r.log_ratios, r.mask, low=0.8, high=1.3),
        lambda log_ratios: 0.8 <= g(log_ratios) <= 1.3,
    ),
    "k3": (
        lambda r: alg.k3_keep(r.log_ratios, r.mask, bound=0.2),
        lambda log_ratios: sum(math.exp(x) - x - 1 for x in log_ratios) / len(log_ratios) <= 0.2,
    ),
    "veto": (
        lambda r: alg.veto_keep(r.log_ratios, r.mask, low=0.4, high=2.5),
        lambda log_ratios: all(0.4 <= math.exp(x) <= 2.5 for x in log_ratios),
    ),
    "veto kl": (
        lambda r: alg.veto_keep(r.log_ratios, r.mask, low=0.0, high=math.inf, kl=0.3),
        lambda log_ratios: max(math.exp(x) - 1 - x for x in log_ratios) <= 0.3,
    ),
}


@each("seed", SEEDS)
@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_weights_are_their_rules(name, seed):
    rows = random_rows(seed)
    fast, rule = WEIGHT_RULES[name]

    assert torch.allclose(fast(rows), per_row(rows, rule), atol=1e-12)


def test_the_ratio_of_a_row_is_clamped_like_that_of_a_token():
    log_ratios, mask = torch.tensor([[15.0, 15.0], [-15.0, -15.0]]), torch.ones(2, 2, dtype=torch.bool)

    weights = alg.seq_tis_weights(log_ratios.double(), mask, cap=1e12)

    assert weights[:, 0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-12)
    ones = torch.ones(2, 2, dtype=torch.float64)
    losses = alg.seq_tis(-ones - log_ratios, -ones, ones, mask, cap=1e12).losses  # log pi = -1
    assert losses[:, 0].tolist() == pytest.approx(weights[:, 0].tolist(), rel=1e-12)


@pytest.mark.parametrize("name", KEEP_RULES)
def test_masks_are_their_rules_and_both_outcomes_occur(name):
    fast, rule = KEEP_RULES[name]
    outcomes = set()
    for seed in range(10):
        rows = random_rows(seed)
        expected = per_row(rows, lambda log_ratios: [float(rule(log_ratios))] * len(log_ratios)).bool()
        assert torch.equal(fast(rows), expected), f"seed {seed}"
        outcomes |= set(expected[rows.mask].tolist())
    assert outcomes == {True, False}


@each("seed", SEEDS)
def test_geo_bounds_may_differ_by_row(seed):
    rows = random_rows(seed)
    low = torch.tensor([0.1, 0.9, 0.1, 0.99, 0.1, 0.1], dtype=torch.float64)

    keep = alg.geo_keep(rows.log_ratios, rows.mask, low=low, high=10.0 * torch.ones_like(low))

    for i, (log_ratios,) in enumerate(action_lists(rows, "log_ratios")):
        expected = bool(log_ratios) and float(low[i]) <= g(log_ratios) <= 10
        assert keep[i].any().item() == expected
        assert torch.equal(keep[i], rows.mask[i] & expected)


@each("seed", SEEDS)
def test_the_veto_of_a_suffix_keeps_what_came_before_its_trigger(seed):
    rows = random_rows(seed)

    def rule(log_ratios):
        kept, going = [], 1.0
        for x in log_ratios:
            going *= 0.6 <= math.exp(x) and math.exp(x) - 1 - x <= 0.2
            kept.append(going)
        return kept

    keep = alg.veto_keep(rows.log_ratios, rows.mask, low=0.6, high=math.inf, kl=0.2, suffix=True)

    expected = per_row(rows, rule).bool()
    assert torch.equal(keep, expected) and set(expected[rows.mask].tolist()) == {True, False}


def test_the_vetoes_of_one_row_by_hand():
    log_ratios, mask = torch.tensor([[0.1, -1.2, 0.0, 0.9]]), torch.tensor([[True, True, False, True]])
    free = {"low": 0.0, "high": math.inf}
    # k3 = exp(x) - 1 - x: 0.0052, 0.5012, none, 0.5596
    assert alg.veto_keep(log_ratios, mask, **free, kl=0.6).tolist() == [[True, True, False, True]]
    assert alg.veto_keep(log_ratios, mask, **free, kl=0.55, suffix=True).tolist() == [[True, True, False, False]]
    assert alg.veto_keep(log_ratios, mask, **free, kl=0.5, suffix=True).tolist() == [[True, False, False, False]]
    assert alg.veto_keep(log_ratios, mask, **free, kl=0.5).tolist() == [[False] * 4]


def test_opsm_drops_negative_tokens_of_stale_rows_only():
    log_ratios = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-0.1, -0.1], [2.0, 2.0]])
    advantages = torch.tensor([[-1.0, 1.0], [-1.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)

    keep = alg.opsm_keep(log_ratios, advantages, mask, delta=0.5)

    assert keep.tolist() == [[False, True], [False, True], [True, True], [True, True]]


@each("seed", SEEDS)
def test_normalized_weights_have_mean_one(seed):
    rows = random_rows(seed)

    token = alg.normalize_weights(rows.weights, rows.mask)
    sequence = alg.normalize_weights(rows.weights, rows.mask, level="sequence")
    given = alg.normalize_weights(rows.weights, rows.mask, mean=2.0)

    assert float(token[rows.mask].mean()) == pytest.approx(1.0)
    row_means = [float(sequence[i][rows.mask[i]].mean()) for i in range(5)]
    assert sum(row_means) / 5 == pytest.approx(1.0)
    assert torch.allclose(given[rows.mask], rows.weights[rows.mask] / 2)
    assert (alg.normalize_weights(torch.zeros_like(rows.weights), rows.mask) == 0).all()


def test_the_table_of_named_corrections():
    table = alg.CORRECTION_PRESETS

    assert sorted(table) == sorted(
        ["disabled", "bypass_pg_is", "decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs"]
        + [f"decoupled_{rule}{tail}" for rule in ("geo_rs", "k3_rs") for tail in ("", "_token_tis", "_seq_tis")]
        + [f"bypass_ppo_clip{tail}" for tail in ("", "_geo_rs", "_k3_rs")]
        + [f"bypass_pg_geo_rs{tail}" for tail in ("", "_token_tis", "_seq_tis")]
    )
    for name, spec in table.items():
        assert spec.mode == (None if name == "disabled" else name.split("_")[0])
        token, sequence = "token" in name, ("seq_is" in name or "seq_tis" in name or name == "bypass_pg_is")
        assert spec.weight == ("token" if token else "sequence" if sequence else "none")
        assert spec.weight == "none" or spec.cap == 2.0
        if "geo_rs" in name:
            assert (spec.reject, spec.low, spec.high) == ("geometric", 0.999, 1.001)
        elif "k3_rs" in name:
            assert (spec.reject, spec.high) == ("k3", 0.01)
        else:
            assert spec.reject == ("sequence" if name.endswith("_is_rs") else "none")
    with pytest.raises(TypeError):
        table["mine"] = table["disabled"]


@pytest.mark.parametrize("name", alg.CORRECTION_PRESETS)
def test_a_correction_applies_its_weight_and_its_rejection(name):
    rows, spec = random_rows(1, drift=0.02), alg.CORRECTION_PRESETS[name]

    result = alg.apply_correction(spec, rows.log_ratios, rows.mask)

    weights = {
        "none": rows.mask.double(),
        "token": alg.tis_weights(rows.log_ratios, rows.mask, cap=2.0),
        "sequence": alg.seq_tis_weights(rows.log_ratios, rows.mask, cap=2.0),
    }[spec.weight]
    keep = {
        "none": rows.mask,
        "sequence": alg.seq_mis_keep(rows.log_ratios, rows.mask, low=0.5, high=2.0),
        "geometric": alg.geo_keep(rows.log_ratios, rows.mask),
        "k3": alg.k3_keep(rows.log_ratios, rows.mask),
    }[spec.reject]
    assert torch.equal(result.weights, weights)
    assert torch.equal(result.keep, keep)


def test_a_correction_can_normalize_after_truncation():
    rows = random_rows(2)
    spec = alg.CorrectionSpec(mode="decoupled", weight="token", cap=1.2, normalize=True)

    weights = alg.apply_correction(spec, rows.log_ratios, rows.mask).weights

    assert float(weights[rows.mask].mean()) == pytest.approx(1.0)
    raw = alg.tis_weights(rows.log_ratios, rows.mask, cap=1.2)
    assert torch.allclose(weights, raw / raw[rows.mask].mean())
