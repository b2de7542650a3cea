"""Terms beside the reward: KL to the reference, a teacher, entropy, the behavior policy, constraints.

    in the reward      row_penalties off the score (group estimators), shaped_rewards (estimators of rewards per token)
    in the advantage   shaped_advantages
    in the loss        regularized: added to the surrogate's token losses after all its weights, so that no importance
                       weight meant for the policy term ever multiplies them

Every term is a mean over tokens from mu; each brings what makes its gradient right there. Legend: S trajectories of a
micro-batch, A most action tokens of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.objective.kl_options import constraint_limits, needs_reference
from learner.objective.loss_weights import LossWeights
from learner.objective.options import brings_no_ratio
from learner.objective.token_batch import POLICY, REFERENCE, TEACHER, TokenBatch
from streamrl.algorithms import behavior_penalty, kl_estimate, kl_loss, kl_shaped_rewards
from streamrl.algorithms.checks import LOG_BOUND
from streamrl.algorithms.kl import K3_BOUND, LOSS_KINDS
from streamrl.config.schema import ConstraintConfig, DistillConfig, EntropyConfig, KlConfig, LossConfig
from streamrl.metrics.meter import Meter


class Regularizers:
    """The regularizers of one run: what must be scored for them, and where each enters; a term of weight 0 is left out.

    Args:
        kl, constraint, loss, distill: settings, checked by `learner.objective.kl_options.check_regularizers`.
        controls: the current weights; read in every call, moved only between steps.
    """

    def __init__(
        self, kl: KlConfig, constraint: ConstraintConfig, loss: LossConfig, controls: LossWeights,
        distill: DistillConfig | None = None,
    ) -> None:
        self._kl, self._loss, self.controls = kl, loss, controls
        self._distill = distill if distill is not None and distill.teacher is not None else None
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
        """Outputs that a scoring pass must bring."""
        needs = {TEACHER} if self._distill is not None else set()
        if self._measures_kl:
            needs |= {REFERENCE, POLICY} if self.shapes_rewards else {REFERENCE}
        return frozenset(needs)

    @property
    def reads_every_token(self) -> bool:
        """Some term, or what moves its weight, depends on tokens whose advantage is 0."""
        return bool(self.needs) or self.controls.read_every_token

    @property
    def shapes_rewards(self) -> bool:
        """The KL comes off scores and rewards before they are trained on."""
        return self._kl.mode == "reward_k1"

    @torch.no_grad()
    def row_penalties(self, tokens: TokenBatch) -> Tensor:
        """The penalty on each trajectory's score, float64 [S]: the log-ratio of the whole trajectory."""
        # k1 and no other kind: its sum over the tokens is the log-ratio of the trajectory, its mean the KL.
        k1 = kl_estimate(tokens.scored("policy"), tokens.scored("reference"), tokens.mask, kind="k1")
        return self.controls.kl_coef * k1.double().sum(1)

    def shaped_rewards(self, tokens: TokenBatch) -> Tensor:
        """Rewards per token with the KL of each token off, [S, A]."""
        rewards = tokens.micro.rewards
        if not self.shapes_rewards:
            return rewards
        policy, reference = tokens.scored("policy"), tokens.scored("reference")
        return kl_shaped_rewards(rewards, policy, reference, tokens.mask, beta=self.controls.kl_coef)

    @property
    def centers_teacher(self) -> bool:
        """The teacher's term needs its mean over the batch."""
        return self._distill is not None and self._distill.center

    @torch.no_grad()
    def shaped_advantages(self, advantages: Tensor, tokens: TokenBatch, *, teacher_mean: float = 0.0) -> Tensor:
        """`A_t - coef k1_t` under kl.mode=advantage, k1 of the current policy against the reference; [S, A], detached.

        With a teacher also `reward_weight A_t + coef (log pi_teacher - log pi)`: its k1 is a term of the same form,
        from which its mean `teacher_mean` over the batch is taken as a baseline.

        With a surrogate that multiplies by pi/mu the gradient of this part is `E_mu[rho x grad log pi]`, the immediate
        reverse KL, correct on stale data. Unlike a loss of its own it shares the surrogate's clip and masks, and needs
        no gradient through the reference term; unlike `reward_k1` it lacks the KL of later tokens and is neither
        centered, scaled nor whitened with the rewards.
        """
        pulls: list[tuple[float, str, float]] = []
        if self._distill is not None:
            advantages = self._distill.reward_weight * advantages
            pulls.append((self._distill.coef, TEACHER, teacher_mean))
        if self._kl.mode == "advantage":
            pulls.append((self.controls.kl_coef, REFERENCE, 0.0))
        for coef, toward, mean in pulls:
            term = kl_estimate(tokens.policy.detach(), tokens.scored(toward), tokens.mask, kind="k1")
            term = term - mean * tokens.mask
            if self._own_cap is not None:  # nothing else multiplies by pi/mu: the term carries it, truncated
                term = term * tokens.log_ratios.exp().clamp(max=self._own_cap)
            advantages = advantages - coef * term
        return advantages

    def regularized(self, losses: Tensor, tokens: TokenBatch) -> Tensor:
        """The surrogate's token losses, its weights applied, with every term added, [S, A].

        Constraints add `multiplier * error` per token, whose mean is the Lagrangian's term: linear in the token, so no
        part of the batch needs to know the whole mean. The KL's error moves with the gradient of the reverse KL under
        mu.
        """
        kl, controls, behavior, mask = self._kl, self.controls, tokens.behavior, tokens.mask
        policy, entropy, multipliers = tokens.policy, tokens.entropy, controls.multipliers
        if self._loss.behavior_penalty:
            losses = losses + behavior_penalty(behavior, policy, mask, tau=self._loss.behavior_penalty)
        if controls.entropy_coef:
            losses = losses - controls.entropy_coef * entropy
        if controls.kl_coef and kl.mode in LOSS_KINDS:
            pull = kl_loss(behavior, policy, tokens.scored("reference"), mask, kind=kl.mode, cap=kl.cap)
            losses = losses + controls.kl_coef * pull
        if multipliers.get("kl"):
            slope = kl_loss(behavior, policy, tokens.scored("reference"), mask, kind="k2_is", cap=kl.cap)
            # Under mu the mean of rho k3 is KL(policy || reference).
            error = tokens.log_ratios.exp() * kl_estimate(policy.detach(), tokens.scored("reference"), mask, kind="k3")
            error = error - self._limits["kl"]
            losses = losses + multipliers["kl"] * (slope - slope.detach() + error) * mask
        if multipliers.get("entropy"):
            losses = losses + multipliers["entropy"] * (self._limits["entropy"] - entropy) * mask
        return losses

    @torch.no_grad()
    def measure(self, meter: Meter, tokens: TokenBatch, keep: Tensor) -> None:
        """Add kl/* against the reference and distill/* against the teacher, over the tokens of `keep`, [S, A]."""
        # Those that are trained on: one that a mask removed may weigh more than all others.
        for key, other in (("kl/value", tokens.outputs.reference), ("distill/kl", tokens.outputs.teacher)):
            if other is not None:
                _measure_kl(meter, key, tokens, other, keep)


def _measure_kl(meter: Meter, key: str, tokens: TokenBatch, reference: Tensor, keep: Tensor) -> None:
    """Add the mean of k3 with the weights pi/mu, and the share of clamped tokens."""
    policy = tokens.policy.detach()
    k3 = kl_estimate(policy, reference, keep, kind="k3")
    weight = torch.where(keep, tokens.log_ratios.double().exp(), 0.0)
    far = keep & ((policy - reference).abs() >= LOG_BOUND) | (k3 >= K3_BOUND)
    total, mass, num_far, count = torch.stack(
        [(weight * k3).sum(), weight.sum(), far.sum().double(), keep.sum().double()]
    ).tolist()
    if mass > 0:  # False for NaN, which other metrics report
        meter.add(key, total / mass, mass)
    meter.add(f"{key.partition('/')[0]}/clamped_fraction", num_far / max(count, 1.0), count)
