"""Group advantages and baselines against plain statistics of lists."""

import itertools
import math
import statistics

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .rows import action_lists, random_rows

SEEDS = range(6)
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
    scores, ids, _ = random_groups(seed)

    def estimates(**knobs):
        return alg.group_advantages(scores, ids, **knobs)

    rloo, dr_grpo = estimates(), estimates(baseline="group_mean")
    assert torch.equal(estimates(baseline="none"), scores)
    spread = statistics.stdev(dr_grpo.tolist())
    batch_std = estimates(baseline="group_mean", scale="batch_std", eps=0.1)
    assert torch.allclose(batch_std, dr_grpo / (spread + 0.1))
    for i in range(len(scores)):
        group, score = members(scores, ids, i), float(scores[i])
        mean, std, n = statistics.fmean(group), statistics.stdev(group), len(group)
        others = (sum(group) - score) / (n - 1)
        assert float(alg.group_mean(scores, ids)[i]) == pytest.approx(mean)
        assert float(alg.leave_one_out(scores, ids)[i]) == pytest.approx(others)
        assert float(dr_grpo[i]) == pytest.approx(score - mean)
        assert float(rloo[i]) == pytest.approx(score - others)
        assert float(alg.grpo_advantages(scores, ids, eps=1e-3)[i]) == pytest.approx((score - mean) / (std + 1e-3))
        scaled = estimates(baseline="group_mean", scale="std", eps=0.1)
        assert float(scaled[i]) == pytest.approx((score - mean) / (std + 0.1))


@each("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.05, 1.0, 20.0])
def test_optimal_advantages_are_below_the_soft_maximum_of_the_group(seed, beta):
    scores, ids, _ = random_groups(seed)

    result = alg.optimal_advantages(scores, ids, beta=beta)

    for i in range(len(scores)):
        group = members(scores, ids, i)
        value = beta * math.log(statistics.fmean(math.exp(score / beta) for score in group))
        assert float(result[i]) == pytest.approx(float(scores[i]) - value)
    best = torch.stack([scores[ids == one].max() for one in ids])
    alone = torch.tensor([int((ids == one).sum()) == 1 for one in ids])
    sharp = alg.optimal_advantages(scores, ids, beta=1e-6)
    assert torch.allclose(sharp[~alone], (scores - best)[~alone], atol=1e-4)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_equal_scores_and_no_scores_give_exactly_zero(size, value):
    scores, ids = torch.full((size,), value, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)

    for given in (scores, scores.float()):
        assert (alg.grpo_advantages(given, ids) == 0).all() and (alg.optimal_advantages(given, ids) == 0).all()
        for baseline, scale in itertools.product(("group_mean", "leave_one_out"), ("none", "std", "batch_std")):
            assert (alg.group_advantages(given, ids, baseline=baseline, scale=scale) == 0).all()


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

    raw = [
        sum(0.9 ** (t - s) * r[t] for t in range(s, len(r)))
        for (r,) in action_lists(rows, "rewards")
        for s in range(len(r))
    ]
    mean, std = statistics.fmean(raw), statistics.stdev(raw)
    assert result[rows.mask].tolist() == pytest.approx([(x - mean) / std for x in raw], rel=1e-6)


@each("seed", SEEDS)
def test_score_square_norms_are_the_squared_gradient_of_the_log_prob_in_the_logits(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (2, 3, 1), generator=generator)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    probs = logits.detach().softmax(-1)

    cheap = alg.score_square_norms(probs.gather(-1, tokens).squeeze(-1), probs.square().sum(-1), mask)

    logits.log_softmax(-1).gather(-1, tokens).sum().backward()
    assert torch.allclose(cheap, (logits.grad.square().sum(-1) * mask).sum(1))
