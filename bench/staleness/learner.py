"""The learner of the experiment: one update of every member of an arm, with the arm's masks and step size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.pieces import drift_bins, token_logprobs
from bench.staleness.arms import Arm
from bench.staleness.loss import ESS_FIELDS, Rows, ess_by_member, estimate, filtered, keep, row_weights, surrogate
from bench.staleness.optimizer import MemberAdam
from bench.staleness.policy import Shape, features, forward, initial_parameters, shifted, split
from bench.staleness.task import Task, scores
from streamrl.algorithms import DriftModel, aggregate, lr_scale, predict_m2, token_log_ratios, update_drift, value_loss

M2_TARGET = 0.04  # nats squared per token: the budget above which stream_default masks stale negatives
LAG_EDGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_CRITIC_SEED = 10_000  # critics start from seeds of their own


@dataclass(frozen=True, slots=True)
class Experience:
    """Experience from the actors, for every member."""

    prompts: Tensor  # [E, R, L]
    tokens: Tensor  # [E, R, L]
    behavior_logprobs: Tensor  # [E, R, L] as recorded when sampling, unless a negative control replaced them
    lags: Tensor  # int64 [E, L] optimizer steps since the weights that sampled the token


@dataclass(frozen=True, slots=True)
class Facts:
    """Measurements of one update, one entry per member."""

    ess: Tensor  # [E, len(ESS_FIELDS)] of the whole batch, before any filter or mask
    m2: Tensor  # [E] mean squared log-ratio
    clipped: Tensor  # [E] share of tokens that the trust region acted on
    norms: Tensor  # [E] of the gradient before clipping
    step_scale: Tensor  # [E] factor on the learning rate
    log_ratios: Tensor  # [E, R, L]

    def ess_of(self, name: str) -> Tensor:
        return self.ess[:, ESS_FIELDS.index(name)]


class Learner:
    """All members of one arm.

    Args:
        seeds, lrs: of each member; members of one seed start from the same weights.
        scaled: members whose step size follows the ESS even if the arm itself has no such rule.
    """

    def __init__(
        self, arm: Arm, task: Task, shape: Shape, seeds: Sequence[int], lrs: Sequence[float],
        scaled: Sequence[bool] | None = None,
    ) -> None:
        self.arm, self.task, self.shape = arm, task, shape
        self.parameters = _start(shape, seeds).requires_grad_()
        self._lrs = torch.tensor(lrs)
        self._adam = MemberAdam(self.parameters.detach())
        self._scaled = list(scaled) if scaled is not None else [False] * len(seeds)
        self._drift: list[DriftModel | None] = [None] * len(seeds)
        count, rows = len(seeds), task.num_rows
        # Group numbers of different members must differ; 0 .. num_prompts - 1 belong to the first member.
        self._group_ids = (torch.arange(count)[:, None] * task.num_prompts + task.group_ids()).flatten()
        self._mask = torch.ones(count * rows, task.num_tokens, dtype=torch.bool)
        if arm.critic:
            self._critic_shape = replace(shape, num_outputs=1)
            self._critic = _start(self._critic_shape, [seed + _CRITIC_SEED for seed in seeds]).requires_grad_()
            self._critic_adam = MemberAdam(self._critic.detach())

    def weights(self) -> dict[str, Tensor]:
        """The current weights of all members, detached."""
        return split(self.shape, self.parameters.detach())

    def update(self, experience: Experience, active: Tensor | None = None) -> Facts:
        """One optimizer step of the members in `active` (bool [E], None = all).

        A member whose filter leaves nothing of the batch takes no step either: such a batch would never be cut.
        """
        inputs = features(self.shape, experience.prompts, shifted(experience.tokens))
        rows = self._rows(experience)
        logits = forward(self.shape, split(self.shape, self.parameters), inputs)
        policy = token_logprobs(logits.flatten(0, 1), experience.tokens.flatten(0, 1))
        values = self._values(inputs) if self.arm.critic else None
        returns = estimate(self.arm, rows, policy.detach(), values.detach() if values is not None else None)
        token_loss = surrogate(self.arm, rows, policy, returns.advantages)
        log_ratios = token_log_ratios(rows.behavior_logprobs, policy, self._mask)
        kept = keep(self.arm, rows, log_ratios, returns.advantages, self._drift_exceeded(rows, log_ratios))
        weights = row_weights(self.arm, rows)
        # The sum over members: their parameters are apart, and so are their gradients.
        loss = aggregate(token_loss.losses, rows.mask, keep=kept, row_weights=weights)
        (gradient,) = torch.autograd.grad(loss, [self.parameters])
        scale = self._step_scale(ess_by_member(rows, log_ratios, rows.mask, kept))
        trainable = rows.by_member(rows.mask).flatten(1).any(1)
        active = trainable if active is None else active & trainable
        norms = self._adam.step(self.parameters, gradient, self._lrs * scale, active)
        if values is not None:
            self._fit_critic(values, inputs, returns.targets, rows, weights, active)
        return Facts(
            ess=ess_by_member(rows, log_ratios, self._mask, self._mask),
            m2=rows.by_member(log_ratios).square().flatten(1).mean(1),
            clipped=rows.by_member(token_loss.clipped & rows.mask).float().flatten(1).mean(1),
            norms=norms,
            step_scale=scale,
            log_ratios=rows.by_member(log_ratios),
        )

    def _rows(self, experience: Experience) -> Rows:
        members, rows, _ = experience.tokens.shape
        batch = Rows(
            num_members=members,
            behavior_logprobs=experience.behavior_logprobs.flatten(0, 1),
            lags=experience.lags.repeat_interleave(rows, dim=0),
            scores=scores(experience.prompts, experience.tokens).flatten(),
            group_ids=self._group_ids,
            mask=self._mask,
        )
        return filtered(self.arm, batch)

    def _values(self, inputs: Tensor) -> Tensor:
        return forward(self._critic_shape, split(self._critic_shape, self._critic), inputs).squeeze(-1).flatten(0, 1)

    def _fit_critic(
        self, values: Tensor, inputs: Tensor, targets: Tensor, rows: Rows, weights: Tensor, active: Tensor
    ) -> None:
        """`num_critic_steps` steps toward `targets`; `values` [E R, L] are those of the critic before the first."""
        for number in range(self.arm.num_critic_steps):
            losses = value_loss(values if number == 0 else self._values(inputs), targets, rows.mask)
            (gradient,) = torch.autograd.grad(aggregate(losses, rows.mask, row_weights=weights), [self._critic])
            self._critic_adam.step(self._critic, gradient, self._lrs, active)

    def _drift_exceeded(self, rows: Rows, log_ratios: Tensor) -> Tensor:
        """Whether the drift model puts m2 at this batch's mean lag above its target, bool [E]."""
        if self.arm.opsm_delta is None:
            return torch.zeros(rows.num_members, dtype=torch.bool)
        over = []
        columns = (rows.by_member(tensor).unbind(0) for tensor in (log_ratios, rows.lags, rows.mask))
        for member, (ratios, lags, mask) in enumerate(zip(*columns, strict=True)):
            bins = drift_bins(ratios, lags, mask, edges=LAG_EDGES)
            model = update_drift(self._drift[member], bins)
            self._drift[member] = model
            seen = bool(sum(model.count))
            over.append(seen and predict_m2(model, float(lags.float().mean())) > M2_TARGET)
        return torch.tensor(over)

    def _step_scale(self, ess: Tensor) -> Tensor:
        rule = self.arm.lr_rule
        clipped = ess[:, ESS_FIELDS.index("sequence_clipped")].tolist()
        return torch.tensor(
            [
                lr_scale(value, rule="sqrt" if scaled and rule == "none" else rule, floor=self.arm.lr_floor)
                for value, scaled in zip(clipped, self._scaled, strict=True)
            ]
        )


def _start(shape: Shape, seeds: Sequence[int]) -> Tensor:
    """Initial parameters [E, P]."""
    by_seed = {seed: initial_parameters(shape, torch.Generator().manual_seed(seed)) for seed in set(seeds)}
    return torch.stack([by_seed[seed] for seed in seeds])
