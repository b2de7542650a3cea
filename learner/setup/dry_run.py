"""Dry run: one objective step on synthetic data, before anything is loaded.

Each estimator, surrogate and baseline raises on constants that are impossible for it. Calling all of them once here
lets a run fail in its first second, not in its first step or when a controller has moved a clip to the end of its
range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from learner.data.packing import LeaveOut, MicroBatch, pack
from learner.data.trajectories import Trajectory
from learner.objective.loss import micro_batch_loss
from learner.objective.objective import Objective
from learner.objective.options import check_regularizers, entropy_options, need, unused
from learner.objective.plan import BatchPlan
from learner.objective.regularizers import LossWeights, Regularizers
from learner.objective.scoring_pass import with_outputs
from learner.objective.statistics import StepStatistics
from learner.objective.token_batch import LagPolicy, PassOutputs
from learner.ranks.mesh import Ranks
from streamrl.algorithms import find_estimator
from streamrl.config.schema import (
    AdvantageConfig,
    ConstraintConfig,
    CriticConfig,
    DistillConfig,
    EntropyAdapt,
    EntropyConfig,
    FilterConfig,
    KlConfig,
    LossConfig,
    ReferenceConfig,
)
from streamrl.errors import ConfigError, describe
from streamrl.messages import PlanRow

_VERSION, _NUM_TOKENS = 1, 4


@dataclass(frozen=True)
class LossSections:
    """The settings that a loss is made of, and what follows from others.

    Attributes:
        max_lag: the largest bound on the lag that the run may have.
        max_new_tokens: most action tokens of a trajectory.
        steps_per_batch: optimizer steps of one batch.
    """

    advantage: AdvantageConfig
    loss: LossConfig
    kl: KlConfig
    reference: ReferenceConfig
    distill: DistillConfig
    entropy: EntropyConfig
    constraint: ConstraintConfig
    critic: CriticConfig
    filter: FilterConfig
    max_lag: int
    max_new_tokens: int
    steps_per_batch: int


def run_dry(settings: LossSections) -> None:
    """Train on two groups of two synthetic answers with these settings.

    Raises ConfigError: a setting is refused by what would use it, or the loss of plain numbers is not finite.
    """
    estimator = settings.advantage.estimator
    check_regularizers(
        settings.kl, settings.reference, settings.entropy, settings.constraint, settings.loss,
        max_lag=settings.max_lag, steps_per_batch=settings.steps_per_batch, distill=settings.distill,
    )
    _check_alone(settings)
    if not find_estimator(estimator).needs_critic:
        why = f"with advantage.estimator={estimator!r}: it reads no values (vtrace, retrace_v, gae do)"
        unused("critic", settings.critic, [field.name for field in fields(CriticConfig)], why)
    for loss in _moved(settings):
        try:
            value = _one_step(settings, loss)
        except ConfigError:
            raise
        except Exception as error:
            is_own = any(":" in name for name in (estimator, loss.surrogate, loss.correction))
            if not is_own and not isinstance(error, ValueError | TypeError):
                raise
            raise ConfigError(
                f"advantage.estimator={estimator!r} with loss.surrogate={loss.surrogate!r} cannot "
                f"train with these settings: {describe(error) if is_own else error}"
            ) from error
        if not np.isfinite(value):
            raise ConfigError(
                f"loss.surrogate={loss.surrogate!r} with these settings makes a loss of {value} out of ordinary "
                "numbers: look at advantage.options and loss.options."
            )


def _check_alone(settings: LossSections) -> None:
    """Refuse what only the task's reward would use, in a run that learns from the teacher alone."""
    if settings.distill.teacher is None or settings.distill.reward_weight > 0.0:
        return
    why = "with distill.reward_weight=0, which learns from the teacher alone"
    need(
        not find_estimator(settings.advantage.estimator).needs_critic,
        f"advantage.estimator={settings.advantage.estimator!r} trains a critic for nothing {why}: use "
        "algorithm=distill.",
    )
    need(
        not settings.filter.zero_std and settings.filter.accuracy_range is None,
        f"filter.zero_std={str(settings.filter.zero_std).lower()} and filter.accuracy_range="
        f"{settings.filter.accuracy_range} would drop groups by their reward {why}: set filter.zero_std=false "
        "filter.accuracy_range=null, or use algorithm=distill.",
    )


def _moved(settings: LossSections) -> Iterator[LossConfig]:
    """The loss as it starts, and as its controllers may leave it."""
    yield settings.loss
    if settings.entropy.adapt is EntropyAdapt.clip_high:
        yield replace(settings.loss, clip_high=entropy_options(settings.entropy)["high"])


def _one_step(settings: LossSections, loss: LossConfig) -> float:
    controls = LossWeights(settings.kl, settings.entropy, settings.constraint, loss, num_steps=_VERSION)
    objective = Objective(
        settings.advantage, loss, regularizers=Regularizers(
            settings.kl, settings.constraint, loss, controls, settings.distill
        ),
        max_new_tokens=settings.max_new_tokens, max_lag=settings.max_lag,
        filter_truncated=settings.filter.truncated, leave_out=LeaveOut.PASS, steps_per_batch=settings.steps_per_batch,
    )
    rows, ranks, total = _answers(), Ranks(), 0.0
    plan = BatchPlan.from_batch(
        objective, rows, _plan(rows), version=_VERSION, ranks=ranks, lag_policy=LagPolicy(m2_by_lag=(0.01, 0.02))
    )
    statistics = StepStatistics(plan, ranks)
    statistics.watch(range(len(rows)))
    batches = pack(rows, 1000, bootstrap=objective.bootstraps)
    of_actions = objective.estimator.of_actions
    plan = with_outputs(plan, [(batch, _scored(batch, of_actions=of_actions)) for batch in batches], ranks)
    for batch in batches:
        logprobs = torch.full((int(batch.mask.sum()),), -1.1, requires_grad=True)
        loss = micro_batch_loss(batch, logprobs, torch.ones_like(logprobs), plan, note=statistics.note)
        total += float(loss.detach())
    found = [value for place, row in enumerate(rows) for value in statistics.watched(place, row.num_tokens)[1]]
    if not np.isfinite(found).all():
        raise ConfigError(
            f"advantage.estimator={settings.advantage.estimator} made advantages of {found} out of ordinary numbers: "
            "they must be finite, at least where `mask` is True."
        )
    statistics.finish()
    return total


def _answers() -> list[Trajectory]:
    """One answer of each group is right; one is cut; tokens are of two versions."""
    # Unequal rewards, a cut trajectory and a stale token reach the branches that ordinary numbers would miss.
    length = np.arange(_NUM_TOKENS)
    return [
        Trajectory(
            group_id=group, index=index, prompt_ids=np.zeros(2, np.int32), token_ids=np.zeros(_NUM_TOKENS, np.int32),
            logprobs=np.full(_NUM_TOKENS, -1.0 - 0.1 * index, np.float32), mask=np.ones(_NUM_TOKENS, bool),
            versions=np.minimum(_VERSION, length), rewards=(index * (length == _NUM_TOKENS - 1)).astype(np.float32),
            turns=np.zeros(_NUM_TOKENS, np.int64), reward=float(index), num_turns=1, scores={}, temperature=1.0,
            truncated=group == 1 and index == 0,
        )
        for group in range(2) for index in range(2)
    ]


def _plan(rows: list[Trajectory]) -> list[PlanRow]:
    return [PlanRow(row.group_id, row.index, 0, row.num_tokens, _NUM_TOKENS, row.reward, _VERSION) for row in rows]


def _scored(batch: MicroBatch, *, of_actions: bool) -> PassOutputs:
    """Outputs of every network that a loss may read."""
    some = torch.where(batch.mask, -1.05, 0.0)
    return PassOutputs(
        policy=some, reference=some, proximal=some, teacher=some, values=torch.zeros_like(some),
        bootstrap=torch.zeros(len(some)), action_values=torch.zeros_like(some) if of_actions else None,
        square_norms=torch.ones(len(some)),
    )
