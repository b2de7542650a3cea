"""Terms beside the reward: KL to the reference, entropy, the behavior policy, constraints.

    in the reward      row_kl off the score (group estimators), kl_shaped_rewards (estimators of rewards per token)
    in the advantage   kl_advantages
    in the loss        regularized_losses: added to the surrogate's token losses after all its weights, so that no
                       importance weight meant for the policy term ever multiplies them

Every term is a mean over tokens from mu; each brings what makes its gradient right there. `Regularizers` holds settings
and current weights, the functions below it are pure. Legend: S trajectories of a micro-batch, A most action tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.objective.kl_options import constraint_limits, needs_reference
from learner.objective.loss_weights import LossWeights
from learner.objective.options import brings_no_ratio
from learner.objective.scoring_pass import POLICY, REFERENCE, PassOutputs
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import behavior_penalty, kl_estimate, kl_loss, kl_shaped_rewards
from streamrl.algorithms.checks import LOG_BOUND
from streamrl.algorithms.controls.kl import LOSS_KINDS
from streamrl.config.schema import ConstraintConfig, EntropyConfig, KlConfig, LossConfig
from streamrl.metrics.meter import Meter

_K3_BOUND = 10.0  # where kl_estimate clamps k3


class Regularizers:
    """The regularizers of one run: what must be scored for them, and where each enters.

    Args:
        kl, constraint, loss: settings, checked by `learner.objective.kl_options.check_regularizers`.
        controls: the current weights; read in every call, moved only between steps.
    """

    def __init__(self, kl: KlConfig, constraint: ConstraintConfig, loss: LossConfig, controls: LossWeights) -> None:
        self._kl, self._loss, self.controls = kl, loss, controls
        self._limits = constraint_limits(constraint)
        self._measures_kl = needs_reference(kl, constraint)
        self._own_cap = kl.cap if brings_no_ratio(loss) else None

    @classmethod
    def of_loss(cls, loss: LossConfig) -> Regularizers:
        """Only what the loss settings themselves ask for: entropy bonus and behavior penalty."""
        kl, constraint = KlConfig(), ConstraintConfig()
        return cls(kl, constraint, loss, LossWeights(kl, EntropyConfig(), constraint, loss))

    @property
    def needs(self) -> frozenset[str]:
        """What a scoring pass must bring."""
        if not self._measures_kl:
            return frozenset()
        return frozenset({REFERENCE, POLICY} if self.shapes_rewards else {REFERENCE})

    @property
    def shapes_rewards(self) -> bool:
        """The KL comes off scores and rewards before they are trained on."""
        return self._kl.mode == "reward_k1"

    def row_penalties(self, tokens: TokenBatch) -> Tensor:
        """What comes off each trajectory's score, float64 [S]."""
        return self.controls.kl_coef * row_kl(*_scored(tokens.outputs), tokens.mask)

    def shaped_rewards(self, tokens: TokenBatch) -> Tensor:
        """Rewards per token with the KL of each token off, [S, A]."""
        rewards = tokens.micro.rewards
        if not self.shapes_rewards:
            return rewards
        return kl_shaped_rewards(rewards, *_scored(tokens.outputs), tokens.mask, beta=self.controls.kl_coef)

    def shaped_advantages(self, advantages: Tensor, tokens: TokenBatch) -> Tensor:
        """The advantages, less the KL of each token under kl.mode=advantage."""
        reference = tokens.outputs.reference
        if self._kl.mode != "advantage":
            return advantages
        assert reference is not None
        return kl_advantages(
            advantages, tokens.log_ratios, tokens.policy.detach(), reference, tokens.mask,
            coef=self.controls.kl_coef, own_cap=self._own_cap,
        )

    def added_to(self, losses: Tensor, tokens: TokenBatch) -> Tensor:
        """The token losses with every term that acts in the loss, [S, A]."""
        controls = self.controls
        terms = RegularizerTerms(
            kl_kind=self._kl.mode, kl=controls.kl_coef, kl_cap=self._kl.cap, entropy=controls.entropy_coef,
            behavior=self._loss.behavior_penalty, multipliers=controls.multipliers, limits=self._limits,
        )
        assert tokens.entropy is not None
        return regularized_losses(
            losses, tokens.behavior, tokens.policy, tokens.log_ratios, tokens.entropy, tokens.outputs.reference,
            tokens.mask, terms,
        )

    def measure(self, meter: Meter, tokens: TokenBatch, keep: Tensor) -> None:
        """Add this micro-batch's KL, if there is a reference.

        Args:
            keep: bool [S, A], the tokens that are trained on: one that a mask removed may weigh more than all others.
        """
        reference = tokens.outputs.reference
        if reference is not None:
            measure_kl(meter, tokens.log_ratios, tokens.policy.detach(), reference, keep)


def _scored(outputs: PassOutputs) -> tuple[Tensor, Tensor]:
    assert outputs.policy is not None and outputs.reference is not None, "a KL in the reward needs the scoring pass"
    return outputs.policy, outputs.reference


@dataclass(frozen=True, slots=True)
class RegularizerTerms:
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


def regularized_losses(
    losses: Tensor, behavior: Tensor, policy: Tensor, log_ratios: Tensor, entropy: Tensor, reference: Tensor | None,
    mask: Tensor, terms: RegularizerTerms,
) -> Tensor:
    """Token losses with every term added, [S, A].

    Constraints add `multiplier * error` per token, whose mean is `lagrangian_loss`: linear in the token, so no part of
    the batch needs to know the whole mean. The KL's error moves with the gradient of the reverse KL under mu (k2_is).

    Args:
        losses: of the surrogate, its weights applied.
        behavior, policy, reference: log-probs; `reference` may be None if no KL term is on.
        log_ratios: log pi - log mu, detached.
        entropy: of the policy's distribution at each token.
    """
    if terms.behavior:
        losses = losses + behavior_penalty(behavior, policy, mask, tau=terms.behavior)
    if terms.entropy:
        losses = losses - terms.entropy * entropy
    if terms.kl and terms.kl_kind in LOSS_KINDS:
        assert reference is not None
        losses = losses + terms.kl * kl_loss(behavior, policy, reference, mask, kind=terms.kl_kind, cap=terms.kl_cap)
    if terms.multipliers.get("kl"):
        assert reference is not None
        slope = kl_loss(behavior, policy, reference, mask, kind="k2_is", cap=terms.kl_cap)
        # Under mu the mean of rho k3 is KL(policy || reference).
        error = log_ratios.exp() * _detached_k3(policy, reference, mask) - terms.limits["kl"]
        losses = losses + terms.multipliers["kl"] * (slope - slope.detach() + error) * mask
    if terms.multipliers.get("entropy"):
        losses = losses + terms.multipliers["entropy"] * (terms.limits["entropy"] - entropy) * mask
    return losses


@torch.no_grad()
def _detached_k3(policy: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    return kl_estimate(policy, reference, mask, kind="k3")


@torch.no_grad()
def kl_advantages(
    advantages: Tensor, log_ratios: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, *, coef: float,
    own_cap: float | None = None,
) -> Tensor:
    """`A_t - coef k1_t`, k1 of the current policy against the reference; [S, A], detached.

    With a surrogate that multiplies by pi/mu the gradient of this part is `E_mu[rho x grad log pi]`, the immediate
    reverse KL, correct on stale data. Unlike a loss of its own it shares the surrogate's clip and masks, and needs no
    gradient through the reference term; unlike `reward_k1` it lacks the KL of later tokens and is neither centered,
    scaled nor whitened with the rewards.

    Args:
        own_cap: for a surrogate without a ratio (`reinforce`): the term then carries its own, `min(pi/mu, own_cap)`.
    """
    term = kl_estimate(policy, reference, mask, kind="k1")
    if own_cap is not None:
        term = term * log_ratios.exp().clamp(max=own_cap)
    return advantages - coef * term


@torch.no_grad()
def row_kl(policy: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Sum of k1 over each row's action tokens, float64 [S]: the log-ratio of the whole trajectory."""
    return kl_estimate(policy, reference, mask, kind="k1").double().sum(1)


@torch.no_grad()
def measure_kl(meter: Meter, log_ratios: Tensor, policy: Tensor, reference: Tensor, mask: Tensor) -> None:
    """Add kl/value, the mean of k3 over tokens with the weights pi/mu, and kl/clamped_fraction."""
    k3 = kl_estimate(policy, reference, mask, kind="k3")
    weight = torch.where(mask, log_ratios.double().exp(), 0.0)
    far = mask & ((policy - reference).abs() >= LOG_BOUND) | (k3 >= _K3_BOUND)
    total, mass, num_far, count = torch.stack(
        [(weight * k3).sum(), weight.sum(), far.sum().double(), mask.sum().double()]
    ).tolist()
    if mass > 0:  # False for NaN, which other metrics report
        meter.add("kl/value", total / mass, mass)
    meter.add("kl/clamped_fraction", num_far / max(count, 1.0), count)
