"""What pulls on the policy besides the reward: KL to the reference, entropy, the behavior policy, constraints.

    in the reward      row_kl off the score (group estimators), kl_shaped_rewards (estimators of rewards per token)
    in the advantage   kl_advantages
    in the loss        regularized_losses: added to the surrogate's token losses after all its weights, so that no
                       importance weight meant for the policy term ever multiplies them

`Regularizers` is what the objective calls; it holds settings and present weights, the functions below it are pure.
Every term is a mean over tokens from mu; each brings what makes its gradient right there. Shapes: S rows, A action
tokens of the longest, of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.objective.kl_options import brings_no_ratio, constraint_limits, needs_reference
from learner.objective.loss_weights import LossWeights
from learner.objective.scoring_pass import POLICY, REFERENCE, PassOutputs
from streamrl.algorithms import behavior_penalty, kl_estimate, kl_loss, kl_shaped_rewards, log_ratios
from streamrl.algorithms.checks import LOG_BOUND
from streamrl.algorithms.controls.kl import LOSS_KINDS
from streamrl.config.schema import ConstraintConfig, EntropyConfig, KlConfig, LossConfig
from streamrl.metrics.meter import Meter

_K3_BOUND = 10.0  # where kl_estimate clamps k3


class Regularizers:
    """The pulls of one run: what must be scored for them, and where each enters.

    Args:
        kl, constraint, loss: settings, checked by `learner.objective.kl_options.check_regularizers`.
        controls: the present weights; read anew in every call, moved only between steps.
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
        """Scores and rewards are not what the environment said: the KL comes off first."""
        return self._kl.mode == "reward_k1"

    def row_penalties(self, batch: MicroBatch, scored: PassOutputs) -> Tensor:
        """What comes off each trajectory's score, float64 [S]."""
        return self.controls.kl_coef * row_kl(*_both(scored), batch.mask)

    def shaped_rewards(self, batch: MicroBatch, scored: PassOutputs) -> Tensor:
        """Rewards per token with the KL of each token off, [S, A]."""
        if not self.shapes_rewards:
            return batch.rewards
        return kl_shaped_rewards(batch.rewards, *_both(scored), batch.mask, beta=self.controls.kl_coef)

    def shaped_advantages(self, advantages: Tensor, batch: MicroBatch, policy: Tensor, scored: PassOutputs) -> Tensor:
        """The advantages, less the KL of each token under kl.mode=advantage."""
        if self._kl.mode != "advantage":
            return advantages
        assert scored.reference is not None
        return kl_advantages(
            advantages, batch.behavior_logprobs, policy, scored.reference, batch.mask, coef=self.controls.kl_coef,
            own_cap=self._own_cap,
        )

    def added_to(
        self, losses: Tensor, batch: MicroBatch, policy: Tensor, entropy: Tensor, scored: PassOutputs
    ) -> Tensor:
        """The token losses with every term that acts in the loss, [S, A]."""
        controls = self.controls
        pulls = RegularizerTerms(
            kl_kind=self._kl.mode, kl=controls.kl_coef, kl_cap=self._kl.cap, entropy=controls.entropy_coef,
            behavior=self._loss.behavior_penalty, multipliers=controls.multipliers, limits=self._limits,
        )
        return regularized_losses(
            losses, batch.behavior_logprobs, policy, entropy, scored.reference, batch.mask, pulls
        )

    def measure(
        self, meter: Meter, batch: MicroBatch, policy: Tensor, scored: PassOutputs, keep: Tensor | None = None
    ) -> None:
        """Add this micro-batch's KL, if there is a reference.

        Args:
            keep: bool [S, A], the tokens that are trained on: one that a veto removed may weigh more than all others.
        """
        if scored.reference is not None:
            measure_kl(meter, batch.behavior_logprobs, policy, scored.reference, batch.mask if keep is None else keep)


def _both(scored: PassOutputs) -> tuple[Tensor, Tensor]:
    assert scored.policy is not None and scored.reference is not None, "a KL in the reward needs the scoring pass"
    return scored.policy, scored.reference


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
    losses: Tensor, behavior: Tensor, policy: Tensor, entropy: Tensor, reference: Tensor | None, mask: Tensor,
    pulls: RegularizerTerms,
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
    gradient through the reference term; against `reward_k1` it lacks the KL of later tokens and is neither centered,
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
