"""What pulls on the policy besides the reward: KL to the reference, entropy, the behaviour policy, constraints.

    in the reward      row_kl off the score (group estimators), kl_shaped_rewards (estimators of rewards per token)
    in the advantage   kl_advantages
    in the loss        regularised_losses: added to the surrogate's token losses after all its weights, so that no
                       importance weight meant for the policy term ever multiplies them

Every term is a mean over tokens from mu; each brings what makes its gradient right there. Shapes: S rows, A action
tokens of the longest, of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamrl.algorithms import behavior_penalty, kl_estimate, kl_loss, log_ratios
from streamrl.algorithms.contract import LOG_BOUND
from streamrl.algorithms.kl import LOSS_KINDS
from streamrl.metrics.meter import Meter

_K3_BOUND = 10.0  # where kl_estimate clamps k3


@dataclass(frozen=True, slots=True)
class Pulls:
    """Weights of the terms in one step's loss; a term of weight 0 is not computed.

    Attributes:
        kl_kind: a kind of `kl_loss`; any other mode adds nothing to the loss.
        kl_cap: truncation of the weight of `k2_is`.
        multipliers, limits: of the constraints by name: kl (at most), entropy (at least), nats per token.
    """

    kl_kind: str = "off"
    kl: float = 0.0
    kl_cap: float = 2.0
    entropy: float = 0.0
    behavior: float = 0.0
    multipliers: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)


def regularised_losses(
    losses: Tensor, behavior: Tensor, policy: Tensor, entropy: Tensor, reference: Tensor | None, mask: Tensor,
    pulls: Pulls,
) -> Tensor:
    """Token losses with every term of `pulls` added, [S, A].

    Constraints add `multiplier * error` per token, whose mean is `lagrangian_loss`: linear in the token, so no part of
    the batch needs to know the whole mean. The KL's error moves with the gradient of the reverse KL under mu (k2_is).

    Args:
        losses: of the surrogate, its weights applied.
        behavior, policy, reference: log-probs; `reference` may be None if no KL term is on.
        entropy: of the policy's distribution at each token.
    """
    if pulls.behavior:
        losses = losses + behavior_penalty(behavior, policy, mask, tau=pulls.behavior)
    if pulls.entropy:
        losses = losses - pulls.entropy * entropy
    if pulls.kl and pulls.kl_kind in LOSS_KINDS:
        assert reference is not None
        losses = losses + pulls.kl * kl_loss(behavior, policy, reference, mask, kind=pulls.kl_kind, cap=pulls.kl_cap)
    if pulls.multipliers.get("kl"):
        assert reference is not None
        slope = kl_loss(behavior, policy, reference, mask, kind="k2_is", cap=pulls.kl_cap)
        error = weighted_kl(behavior, policy, reference, mask) - pulls.limits["kl"]
        losses = losses + pulls.multipliers["kl"] * (slope - slope.detach() + error) * mask
    if pulls.multipliers.get("entropy"):
        losses = losses + pulls.multipliers["entropy"] * (pulls.limits["entropy"] - entropy) * mask
    return losses


@torch.no_grad()
def weighted_kl(behavior: Tensor, policy: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """rho k3 per token, [S, A], detached: under mu its mean is KL(policy || reference)."""
    return log_ratios(behavior, policy, mask).exp() * kl_estimate(policy, reference, mask, kind="k3")


@torch.no_grad()
def kl_advantages(
    advantages: Tensor, behavior: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, *, coef: float,
    own_cap: float | None = None,
) -> Tensor:
    """`A_t - coef k1_t`, k1 of the present policy against the reference; [S, A], detached.

    With a surrogate that multiplies by pi/mu the gradient of this part is `E_mu[rho x grad log pi]`, the immediate
    reverse KL, correct on stale data. Against a loss of its own it shares the surrogate's clip and masks, and needs no
    gradient through the reference term; against `reward_k1` it lacks the KL of later tokens and is neither centred,
    scaled nor whitened with the rewards.

    Args:
        own_cap: for a surrogate without a ratio (`reinforce`): the term then carries its own, `min(pi/mu, own_cap)`.
    """
    term = kl_estimate(policy, reference, mask, kind="k1")
    if own_cap is not None:
        term = term * log_ratios(behavior, policy, mask).exp().clamp(max=own_cap)
    return advantages - coef * term


@torch.no_grad()
def row_kl(policy: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Sum of k1 over each row's action tokens, float64 [S]: the log-ratio of the whole trajectory."""
    return kl_estimate(policy, reference, mask, kind="k1").double().sum(1)


@torch.no_grad()
def measure_kl(meter: Meter, behavior: Tensor, policy: Tensor, reference: Tensor, mask: Tensor) -> None:
    """Add kl/value, the mean of k3 over tokens with the weights pi/mu, and kl/clamped_fraction."""
    k3 = kl_estimate(policy, reference, mask, kind="k3")
    weight = log_ratios(behavior, policy, mask).double().exp() * mask
    far = mask & ((policy - reference).abs() >= LOG_BOUND) | (k3 >= _K3_BOUND)
    numbers = torch.stack([(weight * k3).sum(), weight.sum(), far.sum().double(), mask.sum().double()]).tolist()
    total, mass, num_far, count = numbers
    if mass > 0:  # False for NaN, which other metrics report
        meter.add("kl/value", total / mass, mass)
    meter.add("kl/clamped_fraction", num_far / max(count, 1.0), count)
