"""Policy losses: values and gradients against scalar transcriptions, and the identities between them."""

import math

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .catalog import LOSSES
from .rows import action_lists, on_rows, random_rows

SEEDS = range(8)

# name: (call, slow) where slow(ell, credit, logp) of one row gives per token (loss, d loss / d logp, clipped).
# With a detached weight w the loss is -w A logp and its slope -w A.


def weighted(weight):
    """`weight(t, ell, credit) -> (w, limited)`"""

    def row(log_ratios, credit, logp):
        out = []
        for t in range(len(log_ratios)):
            w, limited = weight(t, log_ratios, credit[t])
            out.append((-w * credit[t] * logp[t], -w * credit[t], limited))
        return out

    return row


def clip(low, high, ceiling=math.inf, *, sequence=False):
    def row(log_ratios, credit, logp):
        mean = sum(log_ratios) / len(log_ratios)
        out = []
        for x, a in zip(log_ratios, credit, strict=True):
            u = math.exp(mean if sequence else x)
            loss = -min(min(u, ceiling if a < 0 else math.inf) * a, max(1 - low, min(1 + high, u)) * a)
            limited = (a > 0 and u > 1 + high) or (a < 0 and (u < 1 - low or u > ceiling))
            out.append((loss, 0.0 if limited else -a * u, limited))
        return out

    return row


def capped(cap, floor=0.0):
    def weight(t, log_ratios, a):
        ratio = math.exp(log_ratios[t])
        return min(max(ratio, floor), cap), not floor <= ratio <= cap

    return weighted(weight)


def masked(t, log_ratios, a):
    ratio = math.exp(log_ratios[t])
    return (ratio, False) if 0.7 <= ratio <= 1.5 else (0.0, True)


def topr(t, log_ratios, a):
    return (min(whole(log_ratios), 1.0), whole(log_ratios) > 1.0) if a < 0 else (1.0, False)


def minpro(log_ratios, credit, logp):
    ratios = [math.exp(x) for x in log_ratios]
    weights = [u * min(ratios[:t], default=1.0) for t, u in enumerate(ratios)]
    return [
        (-min(w, 2.0) * a * lp, -min(w, 2.0) * a, w > 2.0) for w, a, lp in zip(weights, credit, logp, strict=True)
    ]


def whole(log_ratios):
    return math.exp(max(-20.0, min(20.0, sum(log_ratios))))


def vespo(t, log_ratios, a):
    k, lam = (3.0, 2.0) if a < 0 else (2.0, 3.0)
    x = max(-20.0, min(20.0, sum(log_ratios)))
    return math.exp(lam + k * x - lam * math.exp(x)), False


def dppo(cap, distance):
    """`distance(mu, pi) -> (up, down)`: how far the probability moved in either direction, over its bound."""

    def row(log_ratios, credit, logp):
        out = []
        for x, a, lp in zip(log_ratios, credit, logp, strict=True):
            u, pi, mu = math.exp(x), math.exp(lp), math.exp(lp - x)
            far_up, far_down = distance(mu, pi)
            dropped = (a > 0 and far_up) or (a < 0 and far_down)
            w = 0.0 if dropped else min(u, cap)
            out.append((-w * a * lp, -w * a, dropped or u > cap))
        return out

    return row


def total_variation(mu, pi):
    return pi - mu > 0.2, mu - pi > 0.08


def binary_kl(mu, pi):
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return pi > mu and kl > 0.1, pi < mu and kl > 0.02


def sapo(log_ratios, credit, logp):
    out = []
    for x, a in zip(log_ratios, credit, strict=True):
        tau, u = (1.05 if a < 0 else 1.0), math.exp(x)
        gate = 1 / (1 + math.exp(-tau * (u - 1)))
        out.append((-4 / tau * gate * a, -4 * gate * (1 - gate) * u * a, False))
    return out


def gmpo(log_ratios, credit, logp):
    limited = [(a > 0 and x > 0.4) or (a < 0 and x < -0.4) for x, a in zip(log_ratios, credit, strict=True)]
    bounded = [min(x, 0.4) if a > 0 else max(x, -0.4) if a < 0 else x for x, a in zip(log_ratios, credit, strict=True)]
    n = len(log_ratios)
    row = math.exp(sum(bounded) / n)
    slope = -sum(credit) * row / n
    return [(-a * row, 0.0 if hit else slope, hit) for a, hit in zip(credit, limited, strict=True)]


def oapl(log_ratios, credit, logp):
    gap = 0.5 * sum(log_ratios) - sum(credit) / len(credit)
    return [(gap**2, 2 * 0.5 * gap * len(credit), False)] * len(credit)  # every token's loss moves with every log-prob


def flash_reinforce(log_ratios, credit, logp):
    distance = 0.0
    for x, lp in zip(log_ratios, logp, strict=True):
        pi, mu = math.exp(lp), math.exp(lp - x)
        distance += mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    kept = distance / len(logp) <= 0.2
    weights = [math.exp(x) if kept else 0.0 for x in log_ratios]
    return [(-w * a * lp, -w * a, not kept) for w, a, lp in zip(weights, credit, logp, strict=True)]


def mean_ratio(log_ratios):
    return math.exp(sum(log_ratios) / len(log_ratios))


TRANSCRIPTIONS = {
    "reinforce plain": weighted(lambda t, log_ratios, a: (1.0, False)),
    "ppo_clip": clip(0.2, 0.2),
    "ppo_clip dual": clip(0.2, 0.28, 1.5),
    "ppo_clip capped": clip(0.2, 0.2, 1.4),
    "tis": capped(1.5, 0.6),
    "tis low": capped(0.8),
    "cispo": capped(5.0),
    "aipo": capped(2.0),
    "seq_tis": weighted(lambda t, log_ratios, a: (min(whole(log_ratios), 2.0), whole(log_ratios) > 2.0)),
    "seq_tis geometric": weighted(lambda t, log_ratios, a: (min(mean_ratio(log_ratios), 1.1),
                                                            mean_ratio(log_ratios) > 1.1)),
    "minpro": minpro,
    "mis": weighted(masked),
    "topr": weighted(topr),
    "vespo": weighted(vespo),
    "gspo": clip(0.2, 0.2, sequence=True),
    "sapo": sapo,
    "gmpo": gmpo,
    "oapl": oapl,
    "flash_reinforce": flash_reinforce,
    "dppo_tv": dppo(1.5, total_variation),
    "dppo_kl": dppo(math.inf, binary_kl),
}


@each("seed", SEEDS)
@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_losses_gradients_and_clip_flags_are_their_transcriptions(name, seed):
    rows = random_rows(seed)
    rows = rows.change(log_ratios=rows.policy - rows.behavior, policy=rows.policy.clone().requires_grad_())

    result = LOSSES[name](rows)
    result.losses.sum().backward()

    slow = [
        TRANSCRIPTIONS[name](log_ratios, credit, logp) if log_ratios else []
        for log_ratios, credit, logp in action_lists(rows, "log_ratios", "advantages", "policy")
    ]
    losses, slopes, clipped = (on_rows(rows, [[token[k] for token in row] for row in slow]) for k in range(3))
    assert torch.allclose(result.losses, losses, atol=1e-12)
    assert torch.allclose(rows.policy.grad, slopes, atol=1e-12)
    assert torch.equal(result.clipped, clipped.bool())


@each("seed", SEEDS)
def test_decoupled_ppo_is_a_detached_weight_times_a_clip_on_the_proximal_policy(seed):
    rows = random_rows(seed)
    policy = rows.policy.clone().requires_grad_()

    result = alg.decoupled_ppo(
        rows.behavior,
        rows.proximal,
        policy,
        rows.advantages,
        rows.mask,
        eps_low=0.1,
        eps_high=0.3,
        cap=1.2,
        dual_clip=2.0,
    )
    result.losses.sum().backward()

    for i, j in rows.mask.nonzero().tolist():
        a = float(rows.advantages[i, j])
        w = math.exp(float(rows.proximal[i, j] - rows.behavior[i, j]))
        (loss, slope, limited), *_ = clip(0.1, 0.3, 2.0)([float(rows.policy[i, j] - rows.proximal[i, j])], [a], [0.0])
        assert float(result.losses[i, j].detach()) == pytest.approx(min(w, 1.2) * loss)
        assert float(policy.grad[i, j]) == pytest.approx(min(w, 1.2) * slope)
        assert bool(result.clipped[i, j]) == (limited or w > 1.2)


@each("seed", SEEDS)
def test_reinforce_weights_and_behavior_penalty(seed):
    rows = random_rows(seed)

    losses = alg.reinforce(rows.policy, rows.advantages, rows.mask, weights=rows.weights).losses
    penalty = alg.behavior_penalty(rows.behavior, rows.policy, rows.mask, tau=0.01)

    assert torch.allclose(losses, -1.0 * rows.mask * rows.weights * rows.advantages * rows.policy)
    assert torch.allclose(penalty, rows.mask * 0.01 * (rows.policy - rows.behavior) ** 2)


FULLY_DIFFERENTIABLE = (
    "reinforce plain", "reinforce", "ppo_clip", "ppo_clip dual", "ppo_clip capped", "decoupled_ppo", "gmpo", "sapo",
    "m2po", "behavior_penalty", "kl_estimate k1", "kl_estimate k2", "kl_estimate k3", "kl_loss k1_is", "kl_loss k3_is",
    "kl_loss k2", "kl_loss k3",
)  # fmt: skip


@pytest.mark.parametrize("name", FULLY_DIFFERENTIABLE)
def test_20_gradcheck(name):
    rows = random_rows(0)
    bounds = alg.clip_from_budget(rows.policy - rows.behavior, rows.advantages, rows.mask)

    def losses(policy):
        moved = rows.change(policy=policy)
        if name == "m2po":
            return alg.m2po(moved.behavior, policy, moved.advantages, moved.mask, bounds=bounds).losses
        result = LOSSES[name](moved)
        return result.losses if isinstance(result, alg.TokenLoss) else result

    assert torch.autograd.gradcheck(losses, (rows.policy.clone().requires_grad_(),))


def gradient(call, policy):
    leaf = policy.clone().requires_grad_()
    result = call(leaf)
    (result.losses if isinstance(result, alg.TokenLoss) else result).sum().backward()
    return leaf.grad


@each("seed", range(20))
@pytest.mark.parametrize("knobs", [{}, {"dual_clip": 1.5}, {"ratio_cap": 1.3}, {"dual_clip": 2.0, "ratio_cap": 1.6}])
def test_17_ppo_clip_has_zero_gradient_exactly_where_clipped(knobs, seed):
    rows = random_rows(seed, drift=1.0)
    policy = rows.policy.clone()
    policy[0, 0] = rows.behavior[0, 0] + 50  # beyond the numerical clamp as well
    policy[0, 1] = rows.behavior[0, 1] - 50

    result = alg.ppo_clip(rows.behavior, policy, rows.advantages, rows.mask, **knobs)
    grad = gradient(lambda p: alg.ppo_clip(rows.behavior, p, rows.advantages, rows.mask, **knobs), policy)

    assert torch.equal(grad[rows.mask] == 0, result.clipped[rows.mask])
    assert result.clipped.any() and not result.clipped[rows.mask].all()


@each("seed", range(10))
def test_18_m2po_clips_harmful_tokens_to_the_budget_and_no_more(seed):
    rows = random_rows(seed)
    log_ratios = rows.policy - rows.behavior
    harmful = rows.mask & (log_ratios * rows.advantages > 0)
    m2 = float(log_ratios[harmful].square().mean())

    bounds = alg.clip_from_budget(log_ratios, rows.advantages, rows.mask, budget=m2 / 3, floor_low=0.0, floor_high=0.0)
    after = float(log_ratios[harmful].square().clamp(max=bounds.log_cap**2).mean())
    wider = float(log_ratios[harmful].square().clamp(max=(1.0001 * bounds.log_cap) ** 2).mean())
    assert after == pytest.approx(m2 / 3)
    assert wider > m2 / 3

    within = alg.m2po(rows.behavior, rows.policy, rows.advantages, rows.mask, budget=m2 * 1.001)
    assert not within.clipped.any()
    floors = alg.m2po(rows.behavior, rows.policy, rows.advantages, rows.mask, budget=0.0)
    assert torch.equal(
        floors.clipped,
        alg.ppo_clip(rows.behavior, rows.policy, rows.advantages, rows.mask, eps_low=0.3, eps_high=0.5).clipped,
    )


@each("seed", SEEDS)
def test_18_m2po_in_parts_with_shared_bounds_equals_the_whole(seed):
    rows = random_rows(seed)
    log_ratios = alg.log_ratios(rows.behavior, rows.policy, rows.mask)
    bounds = alg.clip_from_budget(log_ratios, rows.advantages, rows.mask, floor_low=0.3, floor_high=0.5)

    in_one_batch = alg.m2po(rows.behavior, rows.policy, rows.advantages, rows.mask).losses
    parts = [
        alg.m2po(rows.behavior[i], rows.policy[i], rows.advantages[i], rows.mask[i], bounds=bounds).losses
        for i in (slice(0, 2), slice(2, 6))
    ]

    assert torch.equal(torch.cat(parts), in_one_batch)


def test_19_loglinear_proximal_interpolates_by_lag():
    mask = torch.ones(1, 6, dtype=torch.bool)
    behavior = torch.full((1, 6), -1.0, dtype=torch.float64)
    lags = torch.tensor([[0, 1, 2, 4, -3, 0]])
    mask[0, 5] = False

    proximal = alg.loglinear_proximal(behavior, behavior + 2.0, lags, mask)

    assert proximal.tolist() == [[-1.0, -1.0, 0.0, 0.5, -1.0, 0.0]]


@each("seed", SEEDS)
def test_gspo_has_the_gradient_of_the_clipped_row_ratio(seed):
    rows = random_rows(seed)
    constant = alg.broadcast_rows(rows.scores, rows.mask)
    counts = rows.mask.sum(1).clamp(min=1)

    def token_form(p):
        losses = alg.gspo(rows.behavior, p, constant, rows.mask, eps_low=0.1, eps_high=0.1).losses
        return (losses.sum(1) / counts).sum()

    def row_form(p):
        s = (torch.where(rows.mask, p - rows.behavior, 0.0).sum(1) / counts).exp()
        a = torch.where(rows.mask.any(1), rows.scores, 0.0)
        return -torch.minimum(s * a, s.clamp(0.9, 1.1) * a).sum()

    assert token_form(rows.policy).item() == pytest.approx(row_form(rows.policy).item())
    assert torch.allclose(gradient(token_form, rows.policy), gradient(row_form, rows.policy), atol=1e-14)


def test_clip_and_dual_clip_of_a_tie_take_the_whole_gradient():
    # At u = 1 with eps 0 both branches of min() are equal; half a gradient would be a silent learning-rate change.
    one = torch.ones(1, 1, dtype=torch.bool)
    policy = torch.full((1, 1), -1.0, dtype=torch.float64)

    grad = gradient(lambda p: alg.ppo_clip(policy, p, torch.ones_like(p), one, eps_low=0.0, eps_high=0.0), policy)

    assert grad.item() == -1.0


def test_mis_names_are_one_function():
    assert alg.SURROGATES["icepop"] is alg.SURROGATES["dis"] is alg.mis
