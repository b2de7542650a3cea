"""Weights and masks between actor and learner, against their rules in loops."""

from __future__ import annotations

import math

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces
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
    "seq_tis": (
        lambda r: alg.seq_tis_weights(r.log_ratios, r.mask, cap=1.5),
        lambda log_ratios: [min(s(log_ratios), 1.5)] * len(log_ratios),
    ),
    "mis": (
        lambda r: pieces.mis_weights(r.log_ratios, r.mask, low=0.6, high=1.6),
        lambda log_ratios: [math.exp(x) if 0.6 <= math.exp(x) <= 1.6 else 0.0 for x in log_ratios],
    ),
}

KEEP_RULES = {
    "seq_mis": (lambda r: alg.seq_mis_keep(r.log_ratios, r.mask), lambda log_ratios: 0.5 <= s(log_ratios) <= 2.0),
    "geo": (
        lambda r: alg.geo_keep(r.log_ratios, r.mask, low=0.8, high=1.3),
        lambda log_ratios: 0.8 <= g(log_ratios) <= 1.3,
    ),
    "k2 mean": (
        lambda r: pieces.k2_keep(r.log_ratios, r.mask, bound=0.2),
        lambda log_ratios: sum(x * x / 2 for x in log_ratios) / len(log_ratios) <= 0.2,
    ),
    "k2 sum": (
        lambda r: pieces.k2_keep(r.log_ratios, r.mask, bound=0.9, level="sum"),
        lambda log_ratios: sum(x * x / 2 for x in log_ratios) <= 0.9,
    ),
    "k2 max": (
        lambda r: pieces.k2_keep(r.log_ratios, r.mask, bound=0.6, level="max"),
        lambda log_ratios: max(x * x / 2 for x in log_ratios) <= 0.6,
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
def test_k2_per_token(seed):
    rows = random_rows(seed)

    keep = pieces.k2_keep(rows.log_ratios, rows.mask, bound=0.2, level="token")

    assert torch.equal(keep, per_row(rows, lambda log_ratios: [float(x * x / 2 <= 0.2) for x in log_ratios]).bool())


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


def test_geo_bound_grows_with_drift_and_shrinks_with_length():
    lengths = torch.tensor([1, 100, 10_000, 0])

    bound = pieces.geo_bound(0.02, lengths, base=0.001)

    expected = [0.001 + 3 * math.sqrt(2 * 0.02 / n) + 0.02 for n in (1, 100, 10_000)]
    assert bound.tolist() == pytest.approx([*expected, 0.0])
    by_row = pieces.geo_bound(torch.tensor([0.02, 0.0, 0.5, 0.1], dtype=torch.float64), lengths)
    assert by_row.tolist() == pytest.approx([expected[0], 0.001, 0.001 + 3 * math.sqrt(1 / 10_000) + 0.5, 0.0])


def test_geo_bound_covers_gaussian_drift():
    # ell ~ N(-s^2/2, s^2) has KL = s^2/2 per token: 3 standard deviations keep at least 99% of rows.
    generator = torch.Generator().manual_seed(0)
    scale, n = 0.3, 200
    log_ratios = scale * torch.randn(4000, n, generator=generator, dtype=torch.float64) - scale**2 / 2
    mask = torch.ones(4000, n, dtype=torch.bool)
    bound = pieces.geo_bound(scale**2 / 2, mask.sum(1), base=0.0)

    keep = alg.geo_keep(log_ratios, mask, low=(-bound).exp(), high=bound.exp())

    assert keep[:, 0].double().mean() > 0.99
    assert alg.geo_keep(log_ratios, mask)[:, 0].double().mean() < 0.05  # the engine-mismatch defaults


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


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r: alg.tis_weights(r.log_ratios, r.mask, cap=1.0, floor=2.0), "floor=2.0 and cap=1.0"),
        (lambda r: alg.seq_tis_weights(r.log_ratios, r.mask, cap=0.0), "cap=0.0"),
        (lambda r: pieces.mis_weights(r.log_ratios, r.mask, low=2.0, high=1.0), "low=2.0 and high=1.0"),
        (lambda r: alg.seq_mis_keep(r.log_ratios, r.mask, low=-1.0), "low=-1.0"),
        (lambda r: alg.geo_keep(r.log_ratios, r.mask, low=r.scores[:-1]), r"low has shape \[5\]"),
        (lambda r: pieces.k2_keep(r.log_ratios, r.mask, bound=1.0, level="row"), "level='row'"),
        (lambda r: alg.k3_keep(r.log_ratios, r.mask, bound=-1.0), "bound=-1.0"),
        (lambda r: alg.normalize_weights(r.weights, r.mask, level="row"), "level='row'"),
        (lambda r: pieces.geo_bound(r.scores, torch.ones(3)), r"\[6\].*\[3\]"),
        (lambda r: alg.apply_correction(alg.CorrectionSpec(weight="row"), r.log_ratios, r.mask), "weight='row'"),
        (lambda r: alg.apply_correction(alg.CorrectionSpec(reject="row"), r.log_ratios, r.mask), "reject='row'"),
    ],
)
def test_wrong_shapes_and_knobs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_rows(0))
