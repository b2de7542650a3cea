"""Surrogates: policy losses per token, with the ratio to the policy that acted bounded or as a detached weight.

Every function takes log-probs from oldest to newest and advantages without own ratio, all [B, T], and returns a
`TokenLoss` to be minimized, differentiable in `policy_logprobs` only. The PPO family keeps the ratio differentiable and
bounds it; the others have the form `-sg(weight) A log pi`. u = pi/mu is the ratio of a token, S the sum of the row's
log-ratios, clamped to +-20.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import LOG_BOUND, clamped_difference, only, read, require, row_counts
from streamrl.algorithms.staleness import clip_from_budget
from streamrl.algorithms.types import ClipBounds, TokenLoss

__all__ = [
    "aipo", "behavior_penalty", "cispo", "decoupled_ppo", "dppo_kl", "dppo_tv", "flash_reinforce", "gmpo", "gspo",
    "loglinear_proximal", "m2po", "minpro", "mis", "oapl", "ppo_clip", "reinforce", "sapo", "seq_tis", "tis", "topr",
    "vespo",
]


def ppo_clip(
    anchor_logprobs: Tensor,  # [B, T] behavior, or a proximal policy together with a decoupled weight
    policy_logprobs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # bool [B, T]
    *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None, ratio_cap: float | None = None,
) -> TokenLoss:
    """`-min(u A, clip(u, 1 - eps_low, 1 + eps_high) A)`, u = pi/anchor.

    Args:
        eps_high: 0.28 with eps_low 0.2 is clip-higher (DAPO, arXiv:2503.14476).
        dual_clip: c > 1 bounds the loss of negative tokens by -c A, where plain PPO lets u run away (arXiv:1912.09729).
        ratio_cap: d > 1 + eps_high; `min(u, d)` in the unclipped branch (two-sided GRPO, arXiv:2505.07291).
    Returns:
        `clipped` is True exactly where the gradient of a token with A != 0 vanishes (also beyond the +-20 clamp).
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    _check_clip(eps_low, eps_high, dual_clip, ratio_cap)
    log_ratios, _, advantages = _read(anchor_logprobs, policy_logprobs, advantages, mask)
    # For A < 0 both knobs mean the same: beyond this ratio the loss is constant.
    ceiling = min(bound for bound in (dual_clip, ratio_cap, math.inf) if bound is not None)
    return _clipped_loss(log_ratios.exp(), log_ratios, advantages, mask, eps_low, eps_high, ceiling)


def decoupled_ppo(
    behavior_logprobs: Tensor, proximal_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    eps_low: float = 0.2, eps_high: float = 0.2, cap: float = 2.0, dual_clip: float | None = None,
) -> TokenLoss:
    """`sg(min(pi_prox/mu, cap))` times `ppo_clip` of pi against pi_prox: together one pi/mu.

    The trust region is around the proximal policy (recomputed, log-linear or EWMA weights), the correction against what
    the actor recorded. `clipped` also marks tokens with a truncated weight; those keep a gradient.
    Source: Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298.
    """
    require(cap > 0.0, f"cap={cap} must be positive")
    _check_clip(eps_low, eps_high, dual_clip, None)
    behavior, proximal, policy, advantages = read(
        mask, behavior_logprobs=behavior_logprobs.detach(), proximal_logprobs=proximal_logprobs.detach(),
        policy_logprobs=policy_logprobs, advantages=advantages.detach(),
    )
    log_ratios, ceiling = clamped_difference(proximal, policy), math.inf if dual_clip is None else dual_clip
    inner = _clipped_loss(log_ratios.exp(), log_ratios, advantages, mask, eps_low, eps_high, ceiling)
    weight = clamped_difference(behavior, proximal).exp()
    return TokenLoss(
        losses=only(mask, weight.clamp(max=cap) * inner.losses), clipped=inner.clipped | (mask & (weight > cap))
    )


@torch.no_grad()
def loglinear_proximal(behavior_logprobs: Tensor, policy_logprobs: Tensor, lags: Tensor, mask: Tensor) -> Tensor:
    """A proximal policy without a forward pass: `log mu + alpha (log pi - log mu)`, alpha = clamp(1 - 1/lag, 0, 1).

    Lag 0 (and a negative one) gives alpha 0; [B, T], detached. It mainly re-parametrizes the clip: `log r = ell /
    lag`, so a clip of r at 1 +- eps is one of u at about (1 +- eps)^lag. A-3PO, arXiv:2512.06547.
    """
    behavior, policy, lags = read(
        mask, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs, lags=lags
    )
    alpha = 1.0 - 1.0 / lags.clamp(min=1.0)
    return only(mask, behavior + alpha * (policy - behavior))


def gspo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> TokenLoss:
    """PPO clip on the geometric mean ratio `s = exp(g)` of the row; widen the clip for lagged data.

    Token form `s_t = sg(s) exp(log pi - sg(log pi))`, whose row mean has the gradient of s itself. Aggregate with
    seq-mean-token-mean. The length-normalized ratio is a trust-region statistic, not an importance weight.
    Source: arXiv:2507.18071.
    """
    _check_clip(eps_low, eps_high, None, None)
    log_ratios, _, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    mean = (log_ratios.detach().sum(1) / row_counts(mask, log_ratios.dtype))[:, None]
    # ell - sg(ell) is log pi - sg(log pi), finite where log pi is not
    ratio = mean.exp() * (log_ratios - log_ratios.detach()).exp()
    return _clipped_loss(ratio, log_ratios, advantages, mask, eps_low, eps_high)


def gmpo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, log_clip: float = 0.4
) -> TokenLoss:
    """`-A exp(mean_t ell'_t)`, ell' = min(ell, log_clip) if A > 0, max(ell, -log_clip) if A < 0.

    A geometric mean of clipped token ratios, one value per row on each of its tokens. Aggregate with
    seq-mean-token-mean. Source: arXiv:2507.20673.
    """
    require(log_clip > 0.0, f"log_clip={log_clip} must be positive")
    log_ratios, _, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    high = (advantages > 0) & (log_ratios.detach() > log_clip)
    low = (advantages < 0) & (log_ratios.detach() < -log_clip)
    bounded = torch.where(low, torch.full_like(log_ratios, -log_clip), log_ratios)
    bounded = torch.where(high, torch.full_like(log_ratios, log_clip), bounded)
    row = (bounded.sum(1) / row_counts(mask, log_ratios.dtype)).exp()[:, None]
    return TokenLoss(losses=only(mask, -advantages * row), clipped=mask & (high | low))


def sapo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """Soft gate instead of a clip: `-(4 / tau) sigmoid(tau (u - 1)) A`, tau by the sign of A; nothing is clipped hard.

    Source: arXiv:2511.20347.
    """
    require(tau_pos > 0.0 and tau_neg > 0.0, f"tau_pos={tau_pos} and tau_neg={tau_neg} must be positive")
    log_ratios, _, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    ratio = log_ratios.exp()
    tau = torch.where(advantages < 0, torch.full_like(ratio, tau_neg), torch.full_like(ratio, tau_pos))
    losses = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return TokenLoss(losses=only(mask, losses), clipped=torch.zeros_like(mask))


def m2po(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, budget: float = 0.04,
    floor_low: float = 0.3, floor_high: float = 0.5, bounds: ClipBounds | None = None,
) -> TokenLoss:
    """`ppo_clip` on mu, with the widest clip whose harmful tokens keep a second moment within `budget`.

    The bounds belong to the whole optimizer batch: when it is split, compute them once with `clip_from_budget` and pass
    them. Source: M2PO, arXiv:2510.01161.
    """
    log_ratios, _, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    if bounds is None:
        bounds = clip_from_budget(
            log_ratios.detach(), advantages, mask, budget=budget, floor_low=floor_low, floor_high=floor_high
        )
    _check_clip(bounds.eps_low, bounds.eps_high, None, None)
    return _clipped_loss(log_ratios.exp(), log_ratios, advantages, mask, bounds.eps_low, bounds.eps_high)


def behavior_penalty(behavior_logprobs: Tensor, policy_logprobs: Tensor, mask: Tensor, *, tau: float = 1e-3) -> Tensor:
    """`tau ell^2` per action token, [B, T], differentiable: a pull back to mu, without a further forward pass."""
    require(tau >= 0.0, f"tau={tau} must not be negative")
    behavior, policy = read(mask, behavior_logprobs=behavior_logprobs.detach(), policy_logprobs=policy_logprobs)
    return tau * clamped_difference(behavior, policy).square()


def oapl(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, beta: float = 1.0
) -> TokenLoss:
    """`(beta S - A)^2`: a regression of the trajectory's log-ratio S, which is A / beta at the optimum.

    No importance ratio appears, so nothing is clipped and no age of the data makes the gradient explode. Every token
    carries the value of its row. Aggregate with seq-mean-token-mean, and take the estimator `optimal`.
    Source: OAPL, arXiv:2602.19362; its values for beta were not verified.
    """
    require(beta > 0.0, f"beta={beta} must be positive")
    log_ratios, _, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    target = advantages.sum(1) / row_counts(mask, advantages.dtype)
    row = (beta * log_ratios.sum(1) - target).square()[:, None].expand(log_ratios.shape)
    return TokenLoss(losses=only(mask, row), clipped=torch.zeros_like(mask))


def _check_clip(eps_low: float, eps_high: float, dual_clip: float | None, ratio_cap: float | None) -> None:
    require(
        0.0 <= eps_low <= 1.0 and eps_high >= 0.0,
        f"eps_low={eps_low} and eps_high={eps_high} must satisfy 0 <= eps_low <= 1, eps_high >= 0",
    )
    require(dual_clip is None or dual_clip > 1.0, f"dual_clip={dual_clip} must exceed 1")
    require(
        ratio_cap is None or ratio_cap > 1.0 + eps_high,
        f"ratio_cap={ratio_cap} must exceed 1 + eps_high={1.0 + eps_high}",
    )


def _read(
    anchor_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Clamped log-ratio and log-probs, both differentiable, and detached advantages: clean and of one dtype."""
    anchor, policy, advantages = read(
        mask, anchor_logprobs=anchor_logprobs.detach(), policy_logprobs=policy_logprobs, advantages=advantages.detach()
    )
    return clamped_difference(anchor, policy), policy, advantages


def _clipped_loss(
    ratio: Tensor, log_ratios: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float,
    ceiling: float = math.inf,
) -> TokenLoss:
    """`-A ratio` with a constant in place of the ratio wherever the clip, the ceiling or the numerical clamp acts.

    Written as a choice between a constant and the ratio, not as min(): at a tie min() would halve the gradient.
    """
    detached = ratio.detach()
    too_high = (advantages > 0) & (detached > 1.0 + eps_high)
    too_low = (advantages < 0) & (detached < 1.0 - eps_low)
    runaway = (advantages < 0) & (detached > ceiling)
    fixed = torch.where(too_high, torch.full_like(detached, 1.0 + eps_high), detached)
    fixed = torch.where(too_low, torch.full_like(detached, 1.0 - eps_low), fixed)
    fixed = torch.where(runaway, torch.full_like(detached, ceiling), fixed)
    # At the numerical clamp the log-ratio has no gradient: such a token is reported as clipped too.
    beyond_clamp = (advantages != 0) & (log_ratios.detach().abs() >= LOG_BOUND)
    frozen = mask & (too_high | too_low | runaway | beyond_clamp)
    return TokenLoss(losses=only(mask, -advantages * torch.where(frozen, fixed, ratio)), clipped=frozen)


def reinforce(policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, weights: Tensor | None = None) -> TokenLoss:
    """`-sg(w) A log pi`, w = 1 if None: the base of every weighted form.

    Without `weights` it carries no importance ratio: fit for fresh data, or for advantages that hold the ratio already
    (`rho_bar_pg`, `clipped_is`).
    """
    given = {} if weights is None else {"weights": weights.detach()}
    policy, advantages, *rest = read(mask, policy_logprobs=policy_logprobs, advantages=advantages.detach(), **given)
    return _weighted_loss(rest[0] if rest else None, policy, advantages, mask)


def tis(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0,
    floor: float = 0.0,
) -> TokenLoss:
    """Truncated importance sampling: `-sg(min(max(u, floor), cap)) A log pi`.

    `clipped` marks tokens with truncated weight; they keep a gradient.
    """
    require(0.0 <= floor <= cap and cap > 0.0, f"floor={floor} and cap={cap} must satisfy 0 <= floor <= cap, cap > 0")
    log_ratios, policy, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    ratio = log_ratios.detach().exp()
    return _weighted_loss(ratio.clamp(floor, cap), policy, advantages, mask, (ratio > cap) | (ratio < floor))


def cispo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 5.0,
    floor: float = 0.0,
) -> TokenLoss:
    """CISPO: `tis` with cap = 1 + eps_high, lower side off. MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786."""
    return tis(behavior_logprobs, policy_logprobs, advantages, mask, cap=cap, floor=floor)


def aipo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0
) -> TokenLoss:
    """AIPO: `tis`, one-sided. LlamaRL, arXiv:2505.24034."""
    return tis(behavior_logprobs, policy_logprobs, advantages, mask, cap=cap)


def seq_tis(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0,
    geometric: bool = False,
) -> TokenLoss:
    """`-sg(min(exp(S), cap)) A log pi`: one truncated weight for the whole trajectory; `geometric`: mean for sum S."""
    require(cap > 0.0, f"cap={cap} must be positive")
    log_ratios, policy, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    mean = (log_ratios.detach().sum(1) / row_counts(mask, log_ratios.dtype))[:, None]
    ratio = (mean if geometric else _row_log_ratio(log_ratios)).exp()
    return _weighted_loss(ratio.clamp(max=cap), policy, advantages, mask, ratio > cap)


def minpro(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0
) -> TokenLoss:
    """`-sg(min(u_t m_t, cap)) A log pi`, `m_t = min over i < t of u_i`, 1 at the first token.

    The least likely earlier token stands for the product of all of them, the exact weight of the state, which vanishes
    or explodes with the length. After MinPRO, arXiv:2601.22718: the truncation is `tis`'s, not taken from the paper.
    """
    require(cap > 0.0, f"cap={cap} must be positive")
    log_ratios, policy, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    log_ratios = log_ratios.detach()
    earlier = torch.where(mask, log_ratios, torch.inf).roll(1, dims=1)
    earlier[:, :1] = torch.inf
    least = earlier.cummin(1).values
    ratio = (log_ratios + torch.where(least == torch.inf, 0.0, least)).exp()
    return _weighted_loss(ratio.clamp(max=cap), policy, advantages, mask, ratio > cap)


def mis(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, low: float = 0.5,
    high: float = 5.0,
) -> TokenLoss:
    """Masked importance sampling (IcePop; DIS): weight u if `low <= u <= high`, else 0. `clipped` marks the zeroed."""
    require(0.0 <= low <= high, f"low={low} and high={high} must satisfy 0 <= low <= high")
    log_ratios, policy, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    ratio = log_ratios.detach().exp()
    inside = (ratio >= low) & (ratio <= high)
    return _weighted_loss(only(inside, ratio), policy, advantages, mask, ~inside)


def topr(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 1.0
) -> TokenLoss:
    """TOPR: `-A log pi` for A >= 0, `-sg(min(exp(S), cap)) A log pi` for A < 0; the ratio is the trajectory's.

    Positives are imitated at full weight however stale, negatives fade as the policy leaves them. arXiv:2503.14286.
    """
    require(cap > 0.0, f"cap={cap} must be positive")
    log_ratios, policy, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    ratio = _row_log_ratio(log_ratios).exp()
    weights = torch.where(advantages < 0, ratio.clamp(max=cap), torch.ones_like(ratio))
    return _weighted_loss(weights, policy, advantages, mask, (advantages < 0) & (ratio > cap))


def vespo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, k_pos: float = 2.0,
    lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0,
) -> TokenLoss:
    """VESPO: `-sg(phi(S)) A log pi`, `phi = exp(lam + k S - lam exp(S))`, (k, lam) by the sign of A; phi(0) = 1.

    A smooth sequence weight that falls to 0 on both sides; nothing is clipped. arXiv:2602.10693.
    """
    for name, knob in (("k_pos", k_pos), ("lam_pos", lam_pos), ("k_neg", k_neg), ("lam_neg", lam_neg)):
        require(knob >= 0.0, f"{name}={knob} must not be negative")
    log_ratios, policy, advantages = _read(behavior_logprobs, policy_logprobs, advantages, mask)
    log_sum = _row_log_ratio(log_ratios)
    positive = lam_pos + k_pos * log_sum - lam_pos * log_sum.exp()
    negative = lam_neg + k_neg * log_sum - lam_neg * log_sum.exp()
    return _weighted_loss(torch.where(advantages < 0, negative, positive).exp(), policy, advantages, mask)


def flash_reinforce(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, delta: float = 3e-3
) -> TokenLoss:
    """`-sg(u) A log pi`, uncapped, of the trajectories that the policy has not left; `clipped` marks all other rows.

    A row is dropped if the mean over its tokens of the binary KL from mu to pi exceeds `delta`: 0.003 and 0.005 are
    published values. Aggregate with seq-mean-token-mean: dropped rows still count in the mean.
    Source: FlashREINFORCE, as its public reference implementation has it.
    """
    require(delta >= 0.0, f"delta={delta} must not be negative")
    behavior, policy, advantages = _detached_behavior(behavior_logprobs, policy_logprobs, advantages, mask)
    log_ratios, distance = _binary_kl(behavior, policy)
    mean = only(mask, distance).sum(1) / row_counts(mask, distance.dtype)
    kept = (mean <= delta)[:, None].expand(mask.shape)
    return _weighted_loss(only(kept, log_ratios.exp()), policy, advantages, mask, ~kept)


def dppo_tv(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, bound_low: float = 0.2,
    bound_high: float = 0.2, cap: float | None = 20.0,
) -> TokenLoss:
    """DPPO, total variation: `-sg(min(u, cap)) A log pi`, dropped where the step has already gone too far.

    Dropped if A > 0 and `pi - mu > bound_high`, or A < 0 and `mu - pi > bound_low`: a difference of probabilities, not
    of ratios, so rare tokens are not over-clipped. `cap=None` leaves the ratio uncapped. arXiv:2602.04879.
    """
    behavior, policy, advantages = _detached_behavior(behavior_logprobs, policy_logprobs, advantages, mask)
    gap = policy.detach().exp() - behavior.exp()
    return _dppo(behavior, policy, advantages, mask, gap > bound_high, -gap > bound_low, bound_low, bound_high, cap)


def dppo_kl(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, bound_low: float,
    bound_high: float, cap: float | None = 20.0,
) -> TokenLoss:
    """DPPO, binary KL: as `dppo_tv` with `mu log(mu/pi) + (1-mu) log((1-mu)/(1-pi))` as the distance, same sides.

    The bounds have no default because no published value was verified. arXiv:2602.04879.
    """
    behavior, policy, advantages = _detached_behavior(behavior_logprobs, policy_logprobs, advantages, mask)
    log_ratios, distance = _binary_kl(behavior, policy)
    far_up = (log_ratios > 0) & (distance > bound_high)
    far_down = (log_ratios < 0) & (distance > bound_low)
    return _dppo(behavior, policy, advantages, mask, far_up, far_down, bound_low, bound_high, cap)


@torch.no_grad()
def _binary_kl(behavior: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
    """Clamped log-ratio, and the KL from mu to pi of the event that this token is taken; [B, T], detached."""
    log_ratios = clamped_difference(behavior, policy)
    tiny = torch.finfo(log_ratios.dtype).eps
    # 1 - p as -expm1(log p) keeps its digits for p near 1, where most tokens are.
    rest_mu, rest_pi = -torch.expm1(behavior), (-torch.expm1(policy)).clamp(min=tiny)
    return log_ratios, -behavior.exp() * log_ratios + torch.xlogy(rest_mu, rest_mu) - torch.xlogy(rest_mu, rest_pi)


def _detached_behavior(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> list[Tensor]:
    return read(
        mask, behavior_logprobs=behavior_logprobs.detach(), policy_logprobs=policy_logprobs,
        advantages=advantages.detach(),
    )


def _dppo(
    behavior: Tensor, policy: Tensor, advantages: Tensor, mask: Tensor, far_up: Tensor, far_down: Tensor,
    bound_low: float, bound_high: float, cap: float | None,
) -> TokenLoss:
    require(
        bound_low >= 0.0 and bound_high >= 0.0,
        f"bound_low={bound_low} and bound_high={bound_high} must not be negative",
    )
    require(cap is None or cap > 0.0, f"cap={cap} must be positive or None")
    ratio = clamped_difference(behavior, policy.detach()).exp()
    dropped = ((advantages > 0) & far_up) | ((advantages < 0) & far_down)
    capped = torch.zeros_like(mask) if cap is None else ratio > cap
    weights = only(~dropped, ratio if cap is None else ratio.clamp(max=cap))
    return _weighted_loss(weights, policy, advantages, mask, dropped | capped)


def _weighted_loss(
    weights: Tensor | None, policy: Tensor, advantages: Tensor, mask: Tensor, clipped: Tensor | None = None
) -> TokenLoss:
    """`-sg(weights) A log pi`; exactly 0, in value and gradient, where the weight or the advantage is 0."""
    slope = -advantages if weights is None else -advantages * weights
    # Selected rather than multiplied by 0: a dropped token may have log-prob -inf.
    losses = only(mask & (slope != 0), slope * policy)
    return TokenLoss(losses=losses, clipped=torch.zeros_like(mask) if clipped is None else mask & clipped)


def _row_log_ratio(log_ratios: Tensor) -> Tensor:
    """S of each row, clamped and detached, on every token: [B, T]."""
    row = log_ratios.detach().sum(1).clamp(-LOG_BOUND, LOG_BOUND)
    return row[:, None].expand(log_ratios.shape)
