"""Terms beside the reward: KL to the reference, a teacher, entropy, the behavior policy, constraints.

    in the reward      row_penalties off the score (group estimators), shaped_rewards (estimators of rewards per token)
    in the advantage   shaped_advantages
    in the loss        regularized: added to the surrogate's token losses after all its weights, so that no importance
                       weight meant for the policy term ever multiplies them

Every term is a mean over tokens from mu; each brings what makes its gradient right there. Legend: S trajectories of a
micro-batch, A most action tokens of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from learner.data.transfer import Reading
from learner.objective import options
from learner.objective.options import brings_no_ratio, constraint_limits, needs_reference
from learner.objective.token_batch import POLICY, REFERENCE, TEACHER, TokenBatch
from streamrl.algorithms import (
    behavior_penalty,
    clip_high_update,
    entropy_coef_update,
    kl_estimate,
    kl_loss,
    kl_schedule,
    kl_shaped_rewards,
)
from streamrl.algorithms.checks import LOG_BOUND
from streamrl.algorithms.kl import K3_BOUND, LOSS_KINDS
from streamrl.algorithms.types import ConstraintState, KlState
from streamrl.config.schema import (
    ConstraintConfig,
    ConstraintMethod,
    DistillConfig,
    EntropyAdapt,
    EntropyConfig,
    KlConfig,
    LossConfig,
)
from streamrl.metrics.meter import Meter


class Regularizers:
    """The regularizers of one run: what must be scored for them, and where each enters; a term of weight 0 is left out.

    Args:
        kl, constraint, loss, distill: settings, checked by `learner.objective.options.check_regularizers`.
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

    def measure(self, meter: Meter, tokens: TokenBatch, keep: Tensor) -> Reading:
        """Add kl/* against the reference and distill/* against the teacher, over the tokens of `keep`, [S, A]."""
        # Those that are trained on: one that a mask removed may weigh more than all others.
        compared = {"kl/value": tokens.outputs.reference, "distill/kl": tokens.outputs.teacher}
        given = {key: other for key, other in compared.items() if other is not None}
        found = yield [_kl_sums(tokens, other, keep) for other in given.values()]
        for key, sums in zip(given, found, strict=True):
            total, mass, num_far, count = sums.tolist()
            if mass > 0:  # False for NaN, which other metrics report
                meter.add(key, total / mass, mass)
            meter.add(f"{key.partition('/')[0]}/clamped_fraction", num_far / max(count, 1.0), count)


def _kl_sums(tokens: TokenBatch, reference: Tensor, keep: Tensor) -> Tensor:
    """Sums of k3 with the weights pi/mu and of the weights, numbers of clamped tokens and of all; float64."""
    policy = tokens.policy.detach()
    k3 = kl_estimate(policy, reference, keep, kind="k3")
    weight = torch.where(keep, tokens.log_ratios.double().exp(), 0.0)
    far = keep & ((policy - reference).abs() >= LOG_BOUND) | (k3 >= K3_BOUND)
    return torch.stack([(weight * k3).sum(), weight.sum(), far.sum().double(), keep.sum().double()])


MEASURED = {"kl": "kl/value", "entropy": "entropy/mean"}
"""Name of a constraint -> the metric that it bounds."""
SENSES = {"kl": "max", "entropy": "min"}


class LossWeights:
    """Weights that move during a run: of the KL term, the entropy bonus and each constraint, and the upper clip.

    The rules are pure functions of `streamrl.algorithms`; this class keeps their states between steps. All weights are
    constant within a step: after it `record`, then `update`, with the same totals on every rank.

    Args:
        kl, entropy, constraint, loss: settings, checked by `learner.objective.options.check_regularizers`.
        num_steps: steps done before the first one here (for a schedule).
        total_steps: of the run, over which clip distances shrink.
    """

    def __init__(
        self, kl: KlConfig, entropy: EntropyConfig, constraint: ConstraintConfig, loss: LossConfig, *,
        num_steps: int = 0, total_steps: int = 0,
    ) -> None:
        self._kl, self._entropy, self._constraint, self._settings = kl, entropy, constraint, loss
        self._kl_options, self._entropy_options = options.controller_options(kl), options.entropy_options(entropy)
        self._method_options = options.method_options(constraint)
        self._limits, self._total_steps = options.constraint_limits(constraint), total_steps
        self._kl_state = KlState(options.starting_coef(kl))
        self._bonus, self.clip_high = loss.entropy_coef, loss.clip_high
        self._last: dict[str, float] = {}  # newest measurement of each name in MEASURED
        self._duals = {name: ConstraintState() for name in self._limits}
        self._violations: options.Violations = {}
        self._began = options.beginnings(kl, entropy, loss)
        self._follow_schedule(num_steps)  # a resumed run starts in the middle of it

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term; 0 with kl.mode=off."""
        return self._kl_state.coef

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus; with an adaptive one 0 while the last measured entropy is above the target."""
        adapts = self._entropy.adapt is EntropyAdapt.coef
        above = adapts and self._last.get("entropy", 0.0) > self._entropy_options["target"]
        return 0.0 if above else self._bonus

    @property
    def multipliers(self) -> dict[str, float]:
        """Weight of each constraint's error per token, by name (kl, entropy)."""
        return {name: self._multiplier(name) for name in self._limits}

    def _multiplier(self, name: str) -> float:
        sign = 1.0 if SENSES[name] == "max" else -1.0
        error = (self._last[name] - self._limits[name]) * sign if name in self._last else 0.0
        if self._constraint.method is ConstraintMethod.penalty:
            # The slope of weight * relu(e)^2 at the last mean: the gradient of constraint_penalty, micro-batch by
            # micro-batch, though none of them knows the mean.
            return 2.0 * self._method_options["weight"] * max(0.0, error)
        return 0.0 if self._constraint.one_sided and error <= 0.0 else self._duals[name].multiplier

    @property
    def read_every_token(self) -> bool:
        """Some term, or what moves its weight, depends on tokens whose advantage is 0."""
        entropy = self._entropy.adapt is not EntropyAdapt.none or self._settings.entropy_coef > 0.0
        return entropy or self._kl.mode != "off" or bool(self._limits) or self._settings.behavior_penalty > 0.0

    def record(self, meter: Meter) -> None:
        """Log the weights that this step used; call it before `update`."""
        if self._kl.mode != "off":
            meter.add("kl/coef", self.kl_coef)
        if self._bonus or self._entropy.adapt is EntropyAdapt.coef:
            meter.add("entropy/coef", self.entropy_coef)
        if self._entropy.adapt is EntropyAdapt.clip_high:
            meter.add("clip/high", self.clip_high)
        for name, multiplier in self.multipliers.items():
            meter.add(f"constraint/{name}", multiplier)
            if (value := meter.value(MEASURED[name])) is not None:
                broken = options.violation(value, self._limits[name], SENSES[name])
                meter.add_all(options.count_violation(self._violations, name, broken))

    def update(self, meter: Meter, *, num_steps: int, frozen: bool = False) -> None:
        """Move all weights by this step's global means; what was not measured moves nothing.

        Args:
            meter: of the whole step, the same on every rank; read for kl/value, entropy/mean, policy/num_trajectories.
            num_steps: steps (batches) done by now.
            frozen: hold the multipliers of constraints: what the data says of them is too stale (low ESS).
        """
        # A skipped step, or one without tokens, measures nothing; a controller fed with 0 would run away.
        values = {name: meter.value(key) for name, key in MEASURED.items()}
        measured = {name: value for name, value in values.items() if value is not None}
        self._last |= measured
        if "kl" in measured and "kl" in self._began:
            knobs = dict(self._kl_options)
            if self._kl.controller == "horizon":
                knobs["num_trajectories"] = int(meter.value("policy/num_trajectories") or 0)
            self._kl_state = options.CONTROLLERS[self._kl.controller](self._kl_state, measured["kl"], **knobs)
        if "entropy" in measured and self._entropy.adapt is EntropyAdapt.coef:
            self._bonus = entropy_coef_update(self._bonus, measured["entropy"], **self._entropy_options)
        elif "entropy" in measured and self._entropy.adapt is EntropyAdapt.clip_high:
            self.clip_high = clip_high_update(self.clip_high, measured["entropy"], **self._entropy_options)
        rule = options.DUAL_METHODS.get(self._constraint.method)
        for name, dual in self._duals.items():
            if rule is not None and name in measured:
                self._duals[name] = rule(
                    dual, measured[name], self._limits[name], sense=SENSES[name], frozen=frozen, **self._method_options
                )
        self._follow_schedule(num_steps)

    def _follow_schedule(self, num_steps: int) -> None:
        self.clip_scale = options.clip_scale(self._settings, num_steps, self._total_steps)
        if self._kl.controller == "schedule" and self._kl.mode != "off":
            self._kl_state = KlState(
                kl_schedule(num_steps, start=options.starting_coef(self._kl), **self._kl_options)
            )

    def to_plain(self) -> dict[str, Any]:
        """All states as JSON holds them."""
        return {
            "kl": asdict(self._kl_state), "entropy_coef": self._bonus, "clip_high": self.clip_high,
            "last": dict(self._last), "constraints": {name: asdict(state) for name, state in self._duals.items()},
            "violations": dict(self._violations), "began": dict(self._began),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `to_plain()`, with the settings of now."""
        moved = options.going_on(state, self._began)
        self._kl_state = KlState(**moved.get("kl", asdict(self._kl_state)))
        self._bonus = moved.get("entropy_coef", self._bonus)
        self.clip_high = moved.get("clip_high", self.clip_high)
        self._last = {name: float(value) for name, value in state["last"].items()}
        self._violations = dict(state.get("violations", {}))
        for name in self._duals:
            if name in state["constraints"]:
                self._duals[name] = ConstraintState(**state["constraints"][name])
