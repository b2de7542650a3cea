"""Surrogates that keep the ratio differentiable and bound it: the PPO family.

Every function takes log-probs from oldest to newest and advantages without own ratio, all [B, T], and returns a
`TokenLoss` to be minimized, differentiable in `policy_logprobs` only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import LOG_BOUND, check_tokens, only, read, require, row_counts
from streamrl.algorithms.estimators.ratios import differentiable_log_ratios, token_log_ratios
from streamrl.algorithms.staleness.control import clip_from_budget
from streamrl.algorithms.types import ClipBounds, TokenLoss

__all__ = ["behavior_penalty", "decoupled_ppo", "gmpo", "gspo", "loglinear_proximal", "m2po", "ppo_clip", "sapo"]


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
    log_ratios, advantages = _ratio_inputs(anchor_logprobs, policy_logprobs, advantages, mask)
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
    check_tokens(mask, behavior_logprobs=behavior_logprobs, proximal_logprobs=proximal_logprobs)
    inner = ppo_clip(
        proximal_logprobs, policy_logprobs, advantages, mask, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    weight = token_log_ratios(behavior_logprobs, proximal_logprobs, mask).exp()
    return TokenLoss(
        losses=only(mask, weight.clamp(max=cap).to(inner.losses.dtype) * inner.losses),
        clipped=inner.clipped | (mask & (weight > cap)),
    )


@torch.no_grad()
def loglinear_proximal(behavior_logprobs: Tensor, policy_logprobs: Tensor, lags: Tensor, mask: Tensor) -> Tensor:
    """A proximal policy without a forward pass: `log mu + alpha (log pi - log mu)`, alpha = clamp(1 - 1/lag, 0, 1).

    Lag 0 (and a negative one) gives alpha 0; [B, T], detached. It mainly re-parametrizes the clip: `log r = ell /
    lag`, so a clip of r at 1 +- eps is one of u at about (1 +- eps)^lag. A-3PO, arXiv:2512.06547.
    """
    behavior, policy = read(mask, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs)
    (lags,) = read(mask, lags=lags)
    alpha = (1.0 - 1.0 / lags.clamp(min=1.0)).to(behavior.dtype)
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
    log_ratios, advantages = _ratio_inputs(behavior_logprobs, policy_logprobs, advantages, mask)
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
    log_ratios, advantages = _ratio_inputs(behavior_logprobs, policy_logprobs, advantages, mask)
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
    log_ratios, advantages = _ratio_inputs(behavior_logprobs, policy_logprobs, advantages, mask)
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
    if bounds is None:
        log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
        bounds = clip_from_budget(
            log_ratios, advantages.detach(), mask, budget=budget, floor_low=floor_low, floor_high=floor_high
        )
    return ppo_clip(
        behavior_logprobs, policy_logprobs, advantages, mask, eps_low=bounds.eps_low, eps_high=bounds.eps_high
    )


def behavior_penalty(behavior_logprobs: Tensor, policy_logprobs: Tensor, mask: Tensor, *, tau: float = 1e-3) -> Tensor:
    """`tau ell^2` per action token, [B, T], differentiable: a pull back to mu, without a further forward pass."""
    require(tau >= 0.0, f"tau={tau} must not be negative")
    return tau * differentiable_log_ratios(behavior_logprobs, policy_logprobs, mask).square()


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


def _ratio_inputs(
    anchor_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiable clamped log-ratio and detached advantages, clean and of one dtype."""
    anchor, policy, advantages = read(
        mask, anchor_logprobs=anchor_logprobs.detach(), policy_logprobs=policy_logprobs, advantages=advantages.detach()
    )
    return only(mask, (policy - anchor).clamp(-LOG_BOUND, LOG_BOUND)), advantages


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
