"""Group advantages and baselines against plain statistics of lists."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamrl.algorithms as alg
from bench import pieces
from tests.kit.each import each

from .rows import action_lists, random_rows

SEEDS = range(6)
ADVANTAGES = (pieces.dr_grpo_advantages, alg.grpo_advantages, pieces.rloo_advantages, pieces.maxrl_advantages)


def random_groups(seed, *, num_rows=14, positive=False):
    """Rows of four groups in mixed order, one of them of size 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([5, 5, 5, 9, 9, 9, 9, 2, 2, 2, 2, 2, 77, 5])[torch.randperm(num_rows, generator=generator)]
    scores = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return (scores.abs() + 0.1 if positive else scores), ids, torch.rand(num_rows, generator=generator).double() + 0.1


def members(scores, ids, i):
    """Scores of row i's group; of the whole batch if it is alone."""
    group = [float(s) for s, g in zip(scores, ids, strict=True) if g == ids[i]]
    return group if len(group) > 1 else scores.tolist()


@each("seed", SEEDS)
def test_advantages_are_their_formulas(seed):
    scores, ids, _ = random_groups(seed, positive=True)

    for i in range(len(scores)):
        group, score = members(scores, ids, i), float(scores[i])
        mean, std, n = statistics.fmean(group), statistics.stdev(group), len(group)
        others = (sum(group) - score) / (n - 1)
        assert float(alg.group_mean(scores, ids)[i]) == pytest.approx(mean)
        assert float(alg.leave_one_out(scores, ids)[i]) == pytest.approx(others)
        assert float(pieces.dr_grpo_advantages(scores, ids)[i]) == pytest.approx(score - mean)
        assert float(alg.grpo_advantages(scores, ids, eps=1e-3)[i]) == pytest.approx((score - mean) / (std + 1e-3))
        assert float(pieces.rloo_advantages(scores, ids)[i]) == pytest.approx(score - others)
        assert float(pieces.maxrl_advantages(scores, ids, eps=1e-3)[i]) == pytest.approx((score - mean) / (mean + 1e-3))


@each("seed", SEEDS)
def test_weighted_leave_one_out_is_its_formula(seed):
    scores, ids, weights = random_groups(seed)

    result = alg.leave_one_out(scores, ids, weights=weights, min_ess=2.5)

    for i in range(len(scores)):
        others = [j for j in range(len(scores)) if ids[j] == ids[i] and j != i]
        if not others:
            assert float(result[i]) == pytest.approx(float(scores.sum() - scores[i]) / (len(scores) - 1))
            continue
        mass = sum(float(weights[j]) for j in others)
        ess = mass**2 / sum(float(weights[j]) ** 2 for j in others)
        plain = sum(float(scores[j]) for j in others) / len(others)
        weighted = sum(float(weights[j] * scores[j]) for j in others) / mass
        assert float(result[i]) == pytest.approx(weighted if ess >= 2.5 else plain)


@each("seed", SEEDS)
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_opob_is_its_formula(leave_one_out, seed):
    scores, ids, weights = random_groups(seed)
    norms = weights.flip(0) + 0.5

    result = alg.opob(scores, ids, weights, norms, leave_one_out=leave_one_out)

    for i in range(len(scores)):
        group = [j for j in range(len(scores)) if ids[j] == ids[i]]
        if len(group) == 1:
            rest = [float(s) for j, s in enumerate(scores) if j != i or not leave_one_out]
            assert float(result[i]) == pytest.approx(statistics.fmean(rest))
            continue
        used = [j for j in group if j != i or not leave_one_out]
        mass = [float(weights[j] ** 2 * norms[j]) for j in used]
        expected = sum(m * float(scores[j]) for m, j in zip(mass, used, strict=True)) / sum(mass)
        assert float(result[i]) == pytest.approx(expected)


def test_weights_of_zero_fall_back_to_the_plain_mean_of_the_others():
    scores, ids = torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64)
    only_first = torch.tensor([1.0, 0.0, 0.0])

    assert alg.leave_one_out(scores, ids, weights=only_first, min_ess=0.0).tolist() == [4.0, 1.0, 1.0]
    assert alg.opob(scores, ids, only_first, torch.ones(3)).tolist() == [4.0, 1.0, 1.0]
    assert alg.opob(scores, ids, torch.zeros(3), torch.ones(3), leave_one_out=False).tolist() == [3.0] * 3


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_12_equal_scores_give_exactly_zero(size, value):
    scores, ids = torch.full((size,), value, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)

    for advantages in ADVANTAGES:
        assert (advantages(scores, ids) == 0).all(), advantages.__name__
        assert (advantages(scores.float(), ids) == 0).all(), advantages.__name__
    assert (scores - alg.leave_one_out(scores, ids) == 0).all()
    for baseline in ("group_mean", "leave_one_out"):
        for scale in ("none", "std", "batch_std"):
            assert (alg.group_advantages(scores, ids, baseline=baseline, scale=scale) == 0).all()


@each("seed", SEEDS)
def test_12_grpo_ignores_positive_affine_rewards_and_rloo_rescales_dr_grpo(seed):
    scores, ids, _ = random_groups(seed)
    keep = ids != 77
    scores, ids = scores[keep], ids[keep]
    sizes = (ids[:, None] == ids[None, :]).sum(1)

    moved = alg.grpo_advantages(3.7 * scores - 20, ids, eps=0.0)

    assert torch.allclose(moved, alg.grpo_advantages(scores, ids, eps=0.0), atol=1e-10)
    centered = pieces.dr_grpo_advantages(scores, ids)
    assert torch.allclose(pieces.rloo_advantages(scores, ids), centered * sizes / (sizes - 1))


@each("seed", SEEDS)
@pytest.mark.parametrize("advantages", ADVANTAGES)
def test_12_advantages_sum_to_zero_in_their_group(advantages, seed):
    scores, ids, _ = random_groups(seed, positive=True)

    for group in (5, 9, 2):
        assert float(advantages(scores, ids)[ids == group].sum()) == pytest.approx(0, abs=1e-12)


@each("seed", SEEDS)
def test_13_equal_weights_are_no_weights(seed):
    scores, ids, _ = random_groups(seed)

    weighted = alg.leave_one_out(scores, ids, weights=torch.full_like(scores, 0.3), min_ess=0.0)

    assert torch.allclose(weighted, alg.leave_one_out(scores, ids))


@each("seed", SEEDS)
def test_13_a_rows_own_score_and_weight_never_change_its_baseline(seed):
    scores, ids, weights = random_groups(seed)
    norms = weights.flip(0) + 0.5
    baselines = {
        "plain": lambda s, w: alg.leave_one_out(s, ids),
        "weighted": lambda s, w: alg.leave_one_out(s, ids, weights=w, min_ess=1.5),
        "opob": lambda s, w: alg.opob(s, ids, w, norms),
    }

    for name, baseline in baselines.items():
        before = baseline(scores, weights)
        for i in range(len(scores)):
            other_scores, other_weights = scores.clone(), weights.clone()
            other_scores[i] += 50.0
            other_weights[i] *= 3.0
            assert float(baseline(other_scores, other_weights)[i]) == pytest.approx(float(before[i]), abs=1e-9), name


def test_a_single_row_in_the_batch_has_advantage_zero():
    one, ids = torch.tensor([0.7]), torch.tensor([4])

    for advantages in ADVANTAGES:
        assert advantages(one, ids).tolist() == [0.0]
    assert alg.group_advantages(one, ids).tolist() == [0.0]


def test_no_rows_at_all_are_no_advantages():
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)

    for advantages in (*ADVANTAGES, alg.leave_one_out, alg.group_mean, alg.group_advantages):
        assert advantages(none, ids).shape == (0,)
    assert alg.group_advantages(none, ids, scale="batch_std").shape == (0,)


@each("seed", SEEDS)
def test_gdpo_normalizes_each_component_then_whitens(seed):
    generator = torch.Generator().manual_seed(seed)
    components = torch.randn(8, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 100.0])
    ids, weights = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([2.0, 0.5], dtype=torch.float64)

    result = alg.gdpo_advantages(components, ids, weights)

    raw = []
    for i in range(8):
        total = 0.0
        for k in range(2):
            group = members(components[:, k], ids, i)
            centered = float(components[i, k]) - statistics.fmean(group)
            total += float(weights[k]) * centered / (statistics.stdev(group) + 1e-6)
        raw.append(total)
    mean, std = statistics.fmean(raw), statistics.stdev(raw)
    assert result.tolist() == pytest.approx([(x - mean) / std for x in raw], rel=1e-6)


@each("seed", SEEDS)
def test_reinforce_pp_whitens_returns_to_go_over_all_tokens(seed):
    rows = random_rows(seed)

    result = alg.reinforce_pp_advantages(rows.rewards, rows.mask, gamma=0.9)
    baseline = pieces.reinforce_pp_baseline_advantages(rows.scores, rows.group_ids, rows.mask)

    raw = [
        sum(0.9 ** (t - s) * r[t] for t in range(s, len(r)))
        for (r,) in action_lists(rows, "rewards")
        for s in range(len(r))
    ]
    mean, std = statistics.fmean(raw), statistics.stdev(raw)
    assert result[rows.mask].tolist() == pytest.approx([(x - mean) / std for x in raw], rel=1e-6)
    per_row = pieces.dr_grpo_advantages(rows.scores, rows.group_ids)
    spread = [float(per_row[i]) for i in range(6) for _ in range(int(rows.mask[i].sum()))]
    mean, std = statistics.fmean(spread), statistics.stdev(spread)
    assert baseline[rows.mask].tolist() == pytest.approx([(x - mean) / std for x in spread], rel=1e-6)


@each("seed", SEEDS)
def test_score_square_norms_are_the_squared_gradient_of_the_log_prob_in_the_logits(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (2, 3), generator=generator)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    probs = logits.detach().softmax(-1)

    cheap = alg.score_square_norms(probs.gather(-1, tokens[..., None]).squeeze(-1), probs.square().sum(-1), mask)

    pieces.token_logprobs(logits, tokens).sum().backward()
    assert torch.allclose(cheap, (logits.grad.square().sum(-1) * mask).sum(1))


@each("seed", SEEDS)
def test_the_group_estimator_is_score_minus_baseline_over_scale(seed):
    scores, ids, _ = random_groups(seed)

    def estimate(**knobs):
        return alg.group_advantages(scores, ids, **knobs)

    assert torch.allclose(estimate(), pieces.rloo_advantages(scores, ids))
    assert torch.allclose(estimate(baseline="none"), scores)
    assert torch.allclose(estimate(baseline="group_mean", scale="std"), alg.grpo_advantages(scores, ids))
    centered = pieces.dr_grpo_advantages(scores, ids)
    scaled = estimate(baseline="group_mean", scale="batch_std")
    assert torch.allclose(scaled, centered / (statistics.stdev(centered.tolist()) + 1e-6))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-1e3, 1e3)), min_size=1, max_size=12),
    st.floats(-1e3, 1e3),
)
def test_advantages_do_not_change_when_every_score_moves_by_a_constant(rows, shift):
    ids = torch.tensor([g for g, _ in rows])
    scores = torch.tensor([s for _, s in rows], dtype=torch.float64)

    for advantages in (pieces.dr_grpo_advantages, pieces.rloo_advantages):
        assert torch.allclose(advantages(scores + shift, ids), advantages(scores, ids), atol=1e-9)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s, i: alg.grpo_advantages(s, i[:-1]), r"group_ids has shape \[13\] but scores has shape \[14\]"),
        (lambda s, i: alg.leave_one_out(s, i, weights=s[:-1]), r"weights has shape \[13\]"),
        (lambda s, i: alg.opob(s, i, s[:-1], s), r"weights has shape \[13\]"),
        (lambda s, i: alg.gdpo_advantages(s[:, None], i, s), r"\[14, 1\].*\[14\]"),
        (lambda s, i: alg.group_advantages(s, i, scale="max"), "scale='max'"),
        (lambda s, i: alg.group_advantages(s, i, baseline="max"), "baseline='max'"),
    ],
)
def test_wrong_shapes_and_knobs_are_named(call, message):
    scores, ids, _ = random_groups(0)
    with pytest.raises(ValueError, match=message):
        call(scores, ids)
