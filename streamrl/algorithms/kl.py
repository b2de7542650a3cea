"""KL divergence from the reference policy: as a measurement, in the rewards, in the loss.

`x = log pi - log pi_ref`; `k1 = x`, `k2 = x^2/2`, `k3 = exp(-x) - 1 + x`. As a *value* under samples from pi, k1 and k3
are unbiased for KL(pi || ref). As a *loss* the gradients differ (enumerated in the tests):

| samples | factor | k1 | k2 | k3 |
|---|---|---|---|---|
| pi | none | 0 | reverse KL | forward KL |
| mu | none | wrong | wrong | wrong |
| mu | sg(rho) | 0 | reverse KL | forward KL |
| mu | rho, differentiable | reverse KL | wrong | reverse KL |

So a loss on stale data is `k2_is`, or `k1_is`/`k3_is`; plain `k2` only at lag 0. The KL term has its own weight: never
multiply it by the truncated weight of the policy term. A loss per token gives only the immediate term; the gradient of
the sequence KL is reached through rewards (arXiv:2506.09477, 2512.21852).
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import clamped_difference, only, read, require

__all__ = [
    "kl_estimate", "kl_loss", "kl_shaped_rewards",
]


K3_BOUND = 10.0
ESTIMATES = ("k1", "k2", "k3")
LOSS_KINDS = ("k2_is", "k1_is", "k3_is", "k2", "k3", "k1+", "k3+")


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, kind: str = "k3") -> Tensor:
    """k1, k2 or k3 per action token, [B, T], nats, differentiable in `policy_logprobs`.

    Read it as a value; as a loss use `kl_loss`. x is clamped to +-20 and k3 to +-10, with gradient 0 beyond.
    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    require(kind in ESTIMATES, f"kind={kind!r} must be one of {', '.join(ESTIMATES)}")
    policy, reference = read(mask, policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs.detach())
    return _estimate(clamped_difference(reference, policy), kind)


def _estimate(x: Tensor, kind: str) -> Tensor:
    """k1, k2 or k3 of clamped log-ratios x; 0 where x is."""
    if kind == "k1":
        return x
    return x.square() / 2 if kind == "k2" else (torch.expm1(-x) + x).clamp(-K3_BOUND, K3_BOUND)


def kl_loss(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *,
    kind: str = "k2_is", cap: float = 2.0,
) -> Tensor:
    """KL penalty per action token on samples from mu, [B, T], differentiable in `policy_logprobs`; times beta, add.

    Args:
        kind: "k2_is" `sg(min(rho, cap)) k2`; "k1_is", "k3_is" `rho kX` with differentiable rho, uncapped (k3's
            gradient is exactly `rho x`, at any distance); "k2" for lag 0; "k3" the published GRPO term (forward-KL
            gradient, biased on stale data); "k1+", "k3+" the value of kX with the gradient of k2.
        cap: truncation of the weight of "k2_is".
    """
    require(kind in LOSS_KINDS, f"kind={kind!r} must be one of {', '.join(LOSS_KINDS)}")
    require(cap > 0.0, f"cap={cap} must be positive")
    behavior, policy, reference = read(
        mask, behavior_logprobs=behavior_logprobs.detach(), policy_logprobs=policy_logprobs,
        reference_logprobs=reference_logprobs.detach(),
    )
    x = clamped_difference(reference, policy)
    penalty = _estimate(x, kind[:2])
    if kind in ("k2", "k3"):
        return penalty
    if kind in ("k1+", "k3+"):
        slope = _estimate(x, "k2")
        return slope - slope.detach() + penalty.detach()
    log_ratio = clamped_difference(behavior, policy)
    if kind == "k2_is":
        return log_ratio.detach().exp().clamp(max=cap) * penalty
    if kind == "k1_is":
        return log_ratio.exp() * penalty
    # Differentiated directly, a token whose k3 is at its bound would keep `rho k3` of the two terms and lose
    # `rho (1 - exp(-x))`: a push away from the reference just where the policy is farthest from it.
    ratio = log_ratio.detach().exp()
    slope = ratio * x.detach() * log_ratio
    return slope - slope.detach() + ratio * penalty.detach()


@torch.no_grad()
def kl_shaped_rewards(
    rewards: Tensor, policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, beta: float, kind: str = "k1"
) -> Tensor:
    """`r_t - beta kX_t` on every action token, [B, T], detached: shape before any estimator.

    With the surrogate's own ratio this is correct on stale data, and the returns carry the future KL terms that a loss
    per token misses.
    """
    require(beta >= 0.0, f"beta={beta} must not be negative")
    require(kind in ESTIMATES, f"kind={kind!r} must be one of {', '.join(ESTIMATES)}")
    rewards, policy, reference = read(
        mask, rewards=rewards, policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs
    )
    return only(mask, rewards - beta * _estimate(clamped_difference(reference, policy), kind))
