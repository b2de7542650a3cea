"""Surrogates of the form `-sg(weight) A log pi`: the weight is a detached number per token.

Every function takes behavior log-probs as recorded by the actor, current policy log-probs and advantages without own
ratio, all [B, T], and returns a `TokenLoss` to be minimized, differentiable in `policy_logprobs` only. u = pi/mu is the
ratio of a token, S the sum of the row's log-ratios, clamped to +-20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_tokens, only, read, require
from streamrl.algorithms.estimators.ratios import row_log_ratios, token_log_ratios
from streamrl.algorithms.types import TokenLoss

__all__ = ["aipo", "cispo", "dppo_kl", "dppo_tv", "minpro", "mis", "reinforce", "seq_tis", "tis", "topr", "vespo"]


def reinforce(policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, weights: Tensor | None = None) -> TokenLoss:
    """`-sg(w) A log pi`, w = 1 if None: the base of every weighted form.

    Without `weights` it carries no importance ratio: fit for fresh data, or for advantages that hold the ratio already
    (`rho_bar_pg`, `clipped_is`).
    """
    if weights is not None:
        check_tokens(mask, weights=weights)
        (weights,) = read(mask, weights=weights.detach())
    return _weighted_loss(weights, policy_logprobs, advantages, mask)


def tis(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0,
    floor: float = 0.0,
) -> TokenLoss:
    """Truncated importance sampling: `-sg(min(max(u, floor), cap)) A log pi`.

    `clipped` marks tokens with truncated weight; they keep a gradient.
    """
    require(0.0 <= floor <= cap and cap > 0.0, f"floor={floor} and cap={cap} must satisfy 0 <= floor <= cap, cap > 0")
    ratio = token_log_ratios(behavior_logprobs, policy_logprobs, mask).exp()
    return _weighted_loss(ratio.clamp(floor, cap), policy_logprobs, advantages, mask, (ratio > cap) | (ratio < floor))


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
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0
) -> TokenLoss:
    """`-sg(min(exp(S), cap)) A log pi`: one truncated weight for the whole trajectory."""
    require(cap > 0.0, f"cap={cap} must be positive")
    ratio = _row_log_ratio(behavior_logprobs, policy_logprobs, mask).exp()
    return _weighted_loss(ratio.clamp(max=cap), policy_logprobs, advantages, mask, ratio > cap)


def minpro(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 2.0
) -> TokenLoss:
    """`-sg(min(u_t m_t, cap)) A log pi`, `m_t = min over i < t of u_i`, 1 at the first token.

    The least likely earlier token stands for the product of all of them, the exact weight of the state, which vanishes
    or explodes with the length. After MinPRO, arXiv:2601.22718: the truncation is `tis`'s, not taken from the paper.
    """
    require(cap > 0.0, f"cap={cap} must be positive")
    log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
    earlier = torch.where(mask, log_ratios, torch.inf).roll(1, dims=1)
    earlier[:, :1] = torch.inf
    least = earlier.cummin(1).values
    ratio = (log_ratios + torch.where(least == torch.inf, 0.0, least)).exp()
    return _weighted_loss(ratio.clamp(max=cap), policy_logprobs, advantages, mask, ratio > cap)


def mis(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, low: float = 0.5,
    high: float = 5.0,
) -> TokenLoss:
    """Masked importance sampling (IcePop; DIS): weight u if `low <= u <= high`, else 0. `clipped` marks the zeroed."""
    require(0.0 <= low <= high, f"low={low} and high={high} must satisfy 0 <= low <= high")
    ratio = token_log_ratios(behavior_logprobs, policy_logprobs, mask).exp()
    inside = (ratio >= low) & (ratio <= high)
    return _weighted_loss(only(inside, ratio), policy_logprobs, advantages, mask, ~inside)


def topr(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cap: float = 1.0
) -> TokenLoss:
    """TOPR: `-A log pi` for A >= 0, `-sg(min(exp(S), cap)) A log pi` for A < 0; the ratio is the trajectory's.

    Positives are imitated at full weight however stale, negatives fade as the policy leaves them. arXiv:2503.14286.
    """
    require(cap > 0.0, f"cap={cap} must be positive")
    ratio = _row_log_ratio(behavior_logprobs, policy_logprobs, mask).exp()
    (advantages,) = read(mask, advantages=advantages.detach())
    weights = torch.where(advantages < 0, ratio.clamp(max=cap), torch.ones_like(ratio))
    return _weighted_loss(weights, policy_logprobs, advantages, mask, (advantages < 0) & (ratio > cap))


def vespo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, k_pos: float = 2.0,
    lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0,
) -> TokenLoss:
    """VESPO: `-sg(phi(S)) A log pi`, `phi = exp(lam + k S - lam exp(S))`, (k, lam) by the sign of A; phi(0) = 1.

    A smooth sequence weight that falls to 0 on both sides; nothing is clipped. arXiv:2602.10693.
    """
    for name, knob in (("k_pos", k_pos), ("lam_pos", lam_pos), ("k_neg", k_neg), ("lam_neg", lam_neg)):
        require(knob >= 0.0, f"{name}={knob} must not be negative")
    log_sum = _row_log_ratio(behavior_logprobs, policy_logprobs, mask)
    (advantages,) = read(mask, advantages=advantages.detach())
    positive = lam_pos + k_pos * log_sum - lam_pos * log_sum.exp()
    negative = lam_neg + k_neg * log_sum - lam_neg * log_sum.exp()
    return _weighted_loss(torch.where(advantages < 0, negative, positive).exp(), policy_logprobs, advantages, mask)


def dppo_tv(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, bound_low: float = 0.2,
    bound_high: float = 0.2, cap: float | None = 20.0,
) -> TokenLoss:
    """DPPO, total variation: `-sg(min(u, cap)) A log pi`, dropped where the step has already gone too far.

    Dropped if A > 0 and `pi - mu > bound_high`, or A < 0 and `mu - pi > bound_low`: a difference of probabilities, not
    of ratios, so rare tokens are not over-clipped. `cap=None` leaves the ratio uncapped. arXiv:2602.04879.
    """
    with torch.no_grad():
        behavior, policy = read(mask, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs)
        gap = policy.exp() - behavior.exp()
    far_up, far_down = gap > bound_high, -gap > bound_low
    return _dppo(behavior_logprobs, policy_logprobs, advantages, mask, far_up, far_down, bound_low, bound_high, cap)


def dppo_kl(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, bound_low: float,
    bound_high: float, cap: float | None = 20.0,
) -> TokenLoss:
    """DPPO, binary KL: as `dppo_tv` with `mu log(mu/pi) + (1-mu) log((1-mu)/(1-pi))` as the distance, same sides.

    The bounds have no default because no published value was verified. arXiv:2602.04879.
    """
    with torch.no_grad():
        log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
        behavior, policy = read(mask, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs)
        tiny = torch.finfo(log_ratios.dtype).eps
        # 1 - p as -expm1(log p) keeps its digits for p near 1, where most tokens are.
        rest_mu, rest_pi = -torch.expm1(behavior), (-torch.expm1(policy)).clamp(min=tiny)
        distance = -behavior.exp() * log_ratios + torch.xlogy(rest_mu, rest_mu) - torch.xlogy(rest_mu, rest_pi)
        far_up = (log_ratios > 0) & (distance > bound_high)
        far_down = (log_ratios < 0) & (distance > bound_low)
    return _dppo(behavior_logprobs, policy_logprobs, advantages, mask, far_up, far_down, bound_low, bound_high, cap)


def _dppo(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, far_up: Tensor,
    far_down: Tensor, bound_low: float, bound_high: float, cap: float | None,
) -> TokenLoss:
    require(
        bound_low >= 0.0 and bound_high >= 0.0,
        f"bound_low={bound_low} and bound_high={bound_high} must not be negative",
    )
    require(cap is None or cap > 0.0, f"cap={cap} must be positive or None")
    ratio = token_log_ratios(behavior_logprobs, policy_logprobs, mask).exp()
    (advantages,) = read(mask, advantages=advantages.detach())
    dropped = ((advantages > 0) & far_up) | ((advantages < 0) & far_down)
    capped = torch.zeros_like(mask) if cap is None else ratio > cap
    weights = only(~dropped, ratio if cap is None else ratio.clamp(max=cap))
    return _weighted_loss(weights, policy_logprobs, advantages, mask, dropped | capped)


def _weighted_loss(
    weights: Tensor | None, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, clipped: Tensor | None = None
) -> TokenLoss:
    """`-sg(weights) A log pi`; exactly 0, in value and gradient, where the weight or the advantage is 0."""
    policy, advantages = read(mask, policy_logprobs=policy_logprobs, advantages=advantages.detach())
    slope = -advantages if weights is None else -advantages * weights.detach().to(policy.dtype)
    # Selected rather than multiplied by 0: a dropped token may have log-prob -inf.
    losses = only(mask & (slope != 0), slope * policy)
    return TokenLoss(losses=losses, clipped=torch.zeros_like(mask) if clipped is None else mask & clipped)


@torch.no_grad()
def _row_log_ratio(behavior_logprobs: Tensor, policy_logprobs: Tensor, mask: Tensor) -> Tensor:
    """S of each row, clamped, on every token: [B, T]."""
    log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
    return row_log_ratios(log_ratios, mask)[:, None].expand(mask.shape)
