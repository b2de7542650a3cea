"""The training objective of a run: which functions its loss is made of, and what they need to know of a whole batch.

    objective                      settings and functions, the same for every batch
    plan = BatchPlan.from_batch(.) once a batch: baselines, scales, row weights, moments (`plan`)
    plan = score_batch(...)        only if `needs` says so: forward passes before the first gradient (`scoring_pass`)
    micro_batch_loss(...)          once a micro-batch: advantages -> masks -> surrogate -> regularizers (`loss`)
    StepStatistics(plan, ranks)    what the optimizer steps of the batch measured (`statistics.step`)

Every number that needs the whole batch is fixed before the first loss, so a split into micro-batches or ranks changes
nothing; all optimizer steps of the batch share it, and the anchor of the ratio with it. The recorded behavior log-prob
is the only denominator of a ratio. The algorithms are pure functions in `streamrl.algorithms`; this class chooses
between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from learner.data.packing import LeaveOut
from learner.objective.options import (
    WEIGHTED_BASELINES,
    anchor_of,
    check_settings,
    need,
    surrogate_options,
    vanishes_at_zero,
)
from learner.objective.regularizers import Regularizers
from learner.objective.rewards import RewardRules
from learner.objective.token_batch import EWMA, FROZEN, POLICY, PROXIMAL, SQUARE_NORMS, VALUES
from streamrl.algorithms import find_correction, find_estimator, find_surrogate
from streamrl.config.schema import AdvantageBy, AdvantageConfig, LossConfig


class Objective:
    """The training objective of one run; nothing in it changes but the weights that `regularizers.controls` holds.

    Args:
        advantage, loss: settings; checked here, so that a bad pair fails before anything is generated.
        max_new_tokens: constant normalizer of `seq-mean-token-sum-norm`.
        max_lag: the largest bound on the lag that the run may have; 0 permits losses without any ratio.
        regularizers: KL, entropy and constraints; None is what `loss` alone asks for.
        reward_rules: what a trajectory's reward is made of; None takes the task's.
        filter_truncated: trajectories that hit the length limit leave the loss and stay in their group's baseline.
        group_mask: tells which trajectories [P] of a batch are not masked with their group; None masks none.
        leave_out: what trajectories that cannot change the gradient go without, where no term reads them.
        steps_per_batch: optimizer steps of one batch.
    Raises:
        ConfigError: unknown names, a double or a missing importance ratio, a setting that would do nothing.
    """

    def __init__(
        self, advantage: AdvantageConfig, loss: LossConfig, *, max_new_tokens: int, max_lag: int,
        regularizers: Regularizers | None = None, reward_rules: RewardRules | None = None,
        filter_truncated: bool = False, leave_out: LeaveOut = LeaveOut.NOTHING, steps_per_batch: int = 1,
        group_mask: Callable[..., Tensor] | None = None,
    ) -> None:
        check_settings(advantage, loss, max_lag=max_lag, steps_per_batch=steps_per_batch)
        self.advantage, self.loss = advantage, loss
        self.estimator, self.surrogate = find_estimator(advantage.estimator), find_surrogate(loss.surrogate)
        self.correction, self.anchor = find_correction(loss.correction), anchor_of(loss)
        self.max_new_tokens, self.steps_per_batch = max_new_tokens, steps_per_batch
        self.regularizers = regularizers or Regularizers.of_loss(loss)
        self.reward_rules, self.filter_truncated, self.group_mask = reward_rules, filter_truncated, group_mask
        need(
            advantage.by is AdvantageBy.trajectory
            or not (self.regularizers.shapes_rewards or (reward_rules is not None and reward_rules.changes)),
            "advantage.by=agent reads each agent's own rewards: leave a KL in the reward, objectives.combine and the "
            "overlong penalty out, which change the reward of the whole trajectory.",
        )
        self.leave_out = leave_out if self._may_leave_out else LeaveOut.NOTHING

    @property
    def has_critic(self) -> bool:
        """The estimator needs values: build a critic, and keep the last token of truncated trajectories."""
        return self.estimator.needs_critic

    @property
    def bootstraps(self) -> bool:
        """The critic values the end of answers that were cut short."""
        return self.has_critic and self.advantage.bootstrap_truncated

    @property
    def needs(self) -> frozenset[str]:
        """Measurements of the whole batch that must precede the first gradient; empty for most losses."""
        advantage, needs = self.advantage, set(self.regularizers.needs)
        if self.has_critic:
            needs |= {POLICY, VALUES}
        # Means over the batch and ratios of siblings are needed before the first token's loss.
        of_batch = advantage.whiten != "none" or advantage.baseline in WEIGHTED_BASELINES
        if of_batch or advantage.rho_bar_ess_target is not None or self.surrogate.fit is not None:
            needs.add(POLICY)
        # What several optimizer steps share must be known of the policy before the first of them.
        if self.steps_per_batch > 1 and (self.anchor in FROZEN or "policy_logprobs" in self.estimator.inputs):
            needs.add(POLICY)
        if advantage.baseline == "opob":
            needs.add(SQUARE_NORMS)
        if self.anchor == EWMA:
            needs.add(PROXIMAL)
        return frozenset(needs)

    @property
    def surrogate_options(self) -> dict[str, Any]:
        """Knobs of the surrogate as they are now: what moves the clip may have done so."""
        controls = self.regularizers.controls
        return surrogate_options(self.loss, clip_high=controls.clip_high, clip_scale=controls.clip_scale)

    @property
    def _may_leave_out(self) -> bool:
        """The loss of a token without advantage is 0 and nothing else reads it."""
        # What a scoring pass measures depends on the whole batch. A mask by ratio is not known before the pass.
        # A user's correction may read all of a micro-batch.
        whole = self.correction.function is not None
        reads = bool(self.needs) or whole or self.regularizers.reads_every_token
        reads |= self.advantage.by is AdvantageBy.agent  # known of whole trajectories is a mean, 0 for a game of two
        return not reads and vanishes_at_zero(self.surrogate, surrogate_options(self.loss))

    def to_plain(self) -> dict[str, Any]:
        """The state of the loss's controls and the reward rules between batches, for a checkpoint."""
        rules = {} if self.reward_rules is None else self.reward_rules.state()
        return {"loss": self.regularizers.controls.to_plain(), "scores": rules}
