"""The reward that is trained on: several components combined into one, and a penalty on running long.

    combined = reward | weighted sum | Tchebycheff | rank or hypervolume bonus in the group | GDPO
    trained  = combined + scale * overlong penalty, or 0 if it was cut; perhaps / standard deviation over the batch

Both happen before any baseline looks at the scores. A trajectory's reward changes on its last action token, so that
estimators with a critic see the same. Metrics of rewards report the task's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from learner.data.trajectories import Trajectory
from learner.objective.plan_tensors import exchange
from learner.ranks.mesh import Ranks
from streamrl.algorithms import domination_count, gdpo_advantages, hypervolume_contributions, overlong_penalty
from streamrl.algorithms.scores import tchebycheff, weighted_sum
from streamrl.config.schema import ObjectivesConfig, OverlongConfig
from streamrl.errors import ConfigError, ContentError
from streamrl.messages import PlanRow

MIN_STD = 1e-6
METHODS = ("reward", "weighted_sum", "tchebycheff", "pareto", "hypervolume", "gdpo")


class RewardRules:
    """The rules of a trajectory's reward; they remember the best and the worst value of each component.

    Args:
        max_tokens: most action tokens that a trajectory can have.
        correct: the task's reward of a right answer.
    Raises:
        ConfigError: an unknown method, components without one, a bonus without what it needs.
    """

    def __init__(
        self,
        objectives: ObjectivesConfig,
        overlong: OverlongConfig,
        *,
        max_tokens: int,
        correct: float = 1.0,
    ) -> None:
        self._max_tokens = overlong.max_tokens or max_tokens
        self._cache_tokens = _cache_tokens(overlong, self._max_tokens)
        _check(objectives)
        _check_overlong(overlong, self._cache_tokens, max_tokens)
        self._objectives, self._overlong = objectives, overlong
        self._scale = correct if overlong.scale is None else overlong.scale
        self._names = sorted(objectives.components)
        self._signs = {name: 1.0 if weight >= 0 else -1.0 for name, weight in objectives.components.items()}
        self._ideal: dict[str, float] = {}
        self._worst: dict[str, float] = {}

    @property
    def changes(self) -> bool:
        """Whether any reward is another than the task's."""
        objectives, zero = self._objectives, self._overlong.zero_when_truncated
        return objectives.combine != "reward" or objectives.divide_by_std or self._cache_tokens > 0 or zero

    def apply(
        self, trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], ranks: Ranks
    ) -> tuple[list[Trajectory], list[PlanRow]]:
        """Trajectories of this rank and the plan of all, with the rewards to train on; a collective call.

        Raises ContentError: a trajectory lacks a component.
        """
        if not self.changes:
            return list(trajectories), list(plan)
        place_of = {(row.group_id, row.index): i for i, row in enumerate(plan)}
        places = torch.tensor([place_of[row.group_id, row.index] for row in trajectories], dtype=torch.int64)
        scores = torch.tensor([row.reward for row in plan], dtype=torch.float64)
        if self._objectives.combine != "reward":
            scores = self._combine(exchange(places, self._components(trajectories), len(plan), ranks), plan)
        penalty = torch.zeros(len(plan), dtype=torch.float64)
        if self._cache_tokens:
            counts = torch.tensor([row.num_action_tokens for row in plan])
            share = overlong_penalty(counts, max_tokens=self._max_tokens, cache_tokens=self._cache_tokens)
            penalty = self._scale * share.double()
        if self._overlong.zero_when_truncated:
            mine = torch.tensor([float(row.truncated) for row in trajectories])
            cut = exchange(places, mine, len(plan), ranks) > 0
            scores, penalty = scores.masked_fill(cut, 0.0), penalty.masked_fill(cut, 0.0)
        factor = self._factor(scores + penalty)
        scores = factor * (scores + penalty)
        if self._cache_tokens:
            told = zip(trajectories, penalty[places].tolist(), strict=True)
            trajectories = [replace(row, scores={**row.scores, "length_penalty": part}) for row, part in told]
        values = scores[places].tolist()
        return (
            [_with_reward(row, value, factor) for row, value in zip(trajectories, values, strict=True)],
            [msgspec.structs.replace(row, reward=value) for row, value in zip(plan, scores.tolist(), strict=True)],
        )

    def _factor(self, scores: Tensor) -> float:
        """1 / standard deviation of the batch's scores [P] if they are divided by it; equal ones stay as they are."""
        std = float(scores.std()) if self._objectives.divide_by_std and len(scores) > 1 else 1.0
        return 1.0 / std if std > MIN_STD else 1.0

    def state(self) -> dict[str, Any]:
        return {"ideal": dict(self._ideal), "worst": dict(self._worst)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._ideal = {name: float(value) for name, value in state.get("ideal", {}).items()}
        self._worst = {name: float(value) for name, value in state.get("worst", {}).items()}

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises ContentError: a trajectory lacks a component."""
        for row in trajectories if self._objectives.combine != "reward" else ():
            missing = [name for name in self._names if name not in row.scores]
            if missing:
                raise ContentError(
                    "scores", f"group {row.group_id} member {row.index} has no score {missing}, only "
                    f"{sorted(row.scores)}: let the task report it, or leave it out of objectives.components"
                )

    def _components(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """float64 [R, K], larger is better: components with a negative weight change their sign."""
        self.check(trajectories)
        found = torch.zeros(len(trajectories), len(self._names), dtype=torch.float64)
        for place, row in enumerate(trajectories):
            found[place] = self._oriented(row.scores)
        return found

    def _combine(self, components: Tensor, plan: Sequence[PlanRow]) -> Tensor:
        """float64 [P]."""
        settings = self._objectives
        weights = torch.tensor([abs(settings.components[name]) for name in self._names], dtype=torch.float64)
        groups = torch.tensor([row.group_id for row in plan])
        self._remember(components)
        if settings.combine == "tchebycheff":
            if settings.scale_by_range:
                ranges = self._best() - self._least()
                some = torch.where(ranges > 0.0, ranges, 1.0)
                weights = weights / some
            return tchebycheff(components, weights, self._ideal_point())
        if settings.combine == "gdpo":
            return gdpo_advantages(components, groups, weights)
        scores = weighted_sum(components, weights)
        if settings.combine == "weighted_sum":
            return scores
        # Dominance and volume compare answers to one prompt: across groups the prompt's difficulty would decide.
        bonus, reference = torch.zeros_like(scores), self._reference_point()
        for group in groups.unique():
            members = groups == group
            if settings.combine == "pareto":
                bonus[members] = -domination_count(components[members]).double()
            else:
                bonus[members] = hypervolume_contributions(components[members], reference).double()
        return scores + settings.bonus * bonus

    def _remember(self, components: Tensor) -> None:
        """The best and the worst of this batch, if they are of the run."""
        # Those of earlier batches stay, or the same answer would be paid differently from step to step.
        for name, values in zip(self._names, components.T, strict=True):
            best, worst = float(values.max()), float(values.min())
            self._ideal[name] = max(self._ideal.get(name, best), best)
            self._worst[name] = min(self._worst.get(name, worst), worst)

    def _best(self) -> Tensor:
        found = [self._ideal[name] for name in self._names]
        return torch.tensor(found, dtype=torch.float64)

    def _least(self) -> Tensor:
        found = [self._worst[name] for name in self._names]
        return torch.tensor(found, dtype=torch.float64)

    def _ideal_point(self) -> Tensor:
        """The given ideal, or the best seen in the run so far."""
        given = {name: self._signs[name] * value for name, value in self._objectives.ideal.items()}
        return torch.tensor([given.get(name, self._ideal[name]) for name in self._names], dtype=torch.float64)

    def _reference_point(self) -> Tensor:
        """The given point, or the worst seen in the run so far, less a tenth of the range."""
        given = self._objectives.reference_point
        if given:
            return self._oriented(given)
        worst = self._least()
        return worst - 0.1 * (self._best() - worst)

    def _oriented(self, values: Mapping[str, float]) -> Tensor:
        """float64 [K], with the sign that makes larger better."""
        return torch.tensor([self._signs[name] * values[name] for name in self._names], dtype=torch.float64)


def _with_reward(row: Trajectory, reward: float, factor: float) -> Trajectory:
    """The trajectory with this total reward: each of its own times the factor, the rest on its last action token."""
    actions = np.flatnonzero(row.mask)
    rewards = factor * row.rewards
    if len(actions):  # the last action has seen the whole answer: earlier tokens reach it through the return
        rewards[actions[-1]] += reward - factor * row.reward
    return replace(row, rewards=rewards, reward=reward)


def _cache_tokens(overlong: OverlongConfig, max_tokens: int) -> int:
    """Tokens before `max_tokens` over which the penalty grows; 0 is no penalty."""
    if overlong.cache_tokens is not None:
        return overlong.cache_tokens
    if overlong.cache_ratio or overlong.max_tokens is None:
        return math.ceil(overlong.cache_ratio * max_tokens)
    return min(1024, max(1, max_tokens // 4))


def _check_overlong(overlong: OverlongConfig, cache_tokens: int, longest: int) -> None:
    limit = overlong.max_tokens or longest
    if limit > longest:
        raise ConfigError(
            f"overlong.max_tokens={limit} is more than the {longest} new tokens that a trajectory may have "
            "(rollout.train.sampling.max_new_tokens in each turn): lower the one or raise the other."
        )
    if cache_tokens > limit:
        raise ConfigError(f"overlong.cache_tokens={cache_tokens} is more than the {limit} tokens allowed: lower it.")
    if overlong.scale is not None and not cache_tokens:
        raise ConfigError(f"overlong.scale={overlong.scale} does nothing without overlong.cache_ratio.")


def _check(objectives: ObjectivesConfig) -> None:
    method, names = objectives.combine, sorted(objectives.components)
    if method not in METHODS:
        raise ConfigError(f"objectives.combine={method!r} is unknown: choose one of {', '.join(METHODS)}.")
    if method == "reward" and (objectives.ideal or objectives.reference_point):
        raise ConfigError("objectives.ideal and objectives.reference_point do nothing with objectives.combine=reward.")
    if method != "reward" and not names:
        raise ConfigError(
            f"objectives.combine={method!r} combines named scores of the task: name them, "
            "e.g. objectives.components.score=1.0 objectives.components.brevity=0.2."
        )
    if objectives.scale_by_range and method != "tchebycheff":
        raise ConfigError(
            "objectives.scale_by_range=true does nothing with "
            f"objectives.combine={method}: leave it out."
        )
    given = set(objectives.reference_point)
    if method == "hypervolume" and not (2 <= len(names) <= 4 and given in (set(), set(names))):
        raise ConfigError(
            f"objectives.combine=hypervolume needs two to four components and objectives.reference_point for each of "
            f"them or none, got {names} and {sorted(given)}: add what is missing."
        )
    unknown = sorted((set(objectives.ideal) | set(objectives.reference_point)) - set(names))
    if unknown:
        raise ConfigError(f"objectives.ideal and objectives.reference_point name {unknown}, which are no components.")
