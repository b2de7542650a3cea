"""Statistics of the optimizer steps of one batch, collected beside the losses and read when no pass waits for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from learner.data.trajectories import Trajectory
from learner.data.transfer import Reading, read_at_once
from learner.model.critic import CriticResult
from learner.model.gradients import BatchResult
from learner.objective.loss import LossTerms
from learner.objective.measures import (
    RATIO_CAP,
    add_left_out,
    add_plan,
    add_trajectories,
    measure,
    measure_split,
    measure_traces,
)
from learner.objective.plan import BatchPlan
from learner.objective.shadow import Shadow, add_shadows
from learner.objective.token_batch import TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.messages import Agreement
from streamrl.metrics.meter import Meter


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The result of a batch: measurements of all its optimizer steps, their results, the critic's, and statistics."""

    measured: Meter
    result: BatchResult
    statistics: StepStatistics
    critic: CriticResult | None = None


class StepStatistics:
    """This rank's measurements of one batch, an optimizer step at a time; the first step begins with the object.

    Args:
        shadows: algorithms whose gradients are compared with the one in use, at the first optimizer step.
    Attributes:
        version: of the optimizer step that is under way.
        agreements: how this batch's recorded log-probs agree with the learner's.
    """

    def __init__(self, plan: BatchPlan, ranks: Ranks, shadows: Sequence[Shadow] = ()) -> None:
        self._plan, self._ranks, self._shadows = plan, ranks, shadows
        self._scored = plan
        self.agreements = Agreements(plan.recorded)
        self._watched: Collection[int] = ()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.begin_step(0)
        # Every rank has the whole plan: added by each, a trajectory would count once a rank.
        if ranks.rank == 0:
            add_plan(self._meter, plan.batch)
            self._meter.add("group/alone_fraction", plan.row_advantages.fraction_alone, len(plan.batch))
        # Metrics report the rewards of the task, whatever the rules made of them.
        add_trajectories(self._meter, plan.recorded)

    def begin_step(self, number: int) -> None:
        """The batch's optimizer step of this number, counted from 0, follows."""
        plan, tensors = self._plan, self._plan.tensors
        self.version, self._meter = plan.version + number, Meter()
        self._meter.add("policy/num_split_microbatches", 0.0)  # a step without a split reports 0, not nothing
        self._unmeasured: list[tuple[TokenBatch, LossTerms]] = []
        mine = (tensors.minibatches == number % tensors.num_minibatches).nonzero()[:, 0].tolist()
        left_out, oldest_lags = sorted(set(plan.left_out) & set(mine)), plan.oldest_lags
        add_left_out(
            self._meter, [plan.rows[place] for place in left_out],
            num_tokens=int(tensors.num_tokens[tensors.places[mine]].sum()), version=self.version,
            advantages=plan.known_advantages[left_out],
            oldest_lags=None if oldest_lags is None else oldest_lags[left_out] + number,
        )

    def scored(self, plan: BatchPlan) -> None:
        """The scoring pass made this plan of the batch's."""
        self._scored = plan
        if plan.rho_bar is not None:
            self._meter.add("control/rho_bar", plan.rho_bar)

    def split(self, plan: BatchPlan) -> None:
        """A micro-batch was split in two, which made this plan: the passes of the step are made again."""
        self._scored = plan
        self._unmeasured.clear()
        self._meter.add("policy/num_split_microbatches", 1.0)

    def note(self, tokens: TokenBatch, terms: LossTerms) -> None:
        """A micro-batch had its loss: nothing is read from the device before `finish`."""
        self._unmeasured.append((tokens.detached(), terms.detached()))
        for row, place in enumerate(tokens.micro.trajectory_ids):
            if place in self._watched and place not in self._seen:
                # Copied where they are: fetching them here would wait for the device.
                self._seen[place] = tokens.log_ratios[row].detach().clone(), terms.advantages[row].detach().clone()

    def finish(self) -> Meter:
        """Statistics of the optimizer step over all ranks, on every rank; a collective call.

        What is measured once a batch is among those of its first step.
        """
        for tokens, terms in self._unmeasured:
            self._measure(tokens, terms)
        if self._shadows and self.version == self._plan.version:
            seen = [tokens for tokens, _ in self._unmeasured]
            add_shadows(self._meter, self._shadows, self._plan, self._scored, seen, self._ranks)
        self._unmeasured = []
        # Sums and counts are gathered, never means: ranks train different numbers of tokens.
        total = Meter()
        for totals in self._ranks.gather_bytes(self._meter.totals()):
            total.merge(totals)
        return total

    def _measure(self, tokens: TokenBatch, terms: LossTerms) -> None:
        objective, micro = self._plan.objective, tokens.micro
        advantage, estimator = objective.advantage, objective.estimator
        whole = micro.num_tokens + micro.num_shared
        self._meter.add("policy/num_microbatches", 1.0)
        self._meter.add("policy/shared_fraction", micro.num_shared / whole, whole)
        readings = [
            self.agreements.measure(tokens),
            objective.regularizers.measure(self._meter, tokens, terms.masks.keep),
            measure(self._meter, tokens, terms, version=self.version, cap=objective.loss.cap or RATIO_CAP),
            measure_split(self._meter, tokens, self.agreements.mismatches),
        ]
        if {"lam", "c_bar"} <= estimator.knobs and not estimator.of_segments:  # a trace from token to token
            own = {name: value for name, value in advantage.options.items() if name in ("trace_temperature", "leak")}
            readings.append(measure_traces(self._meter, tokens, lam=advantage.lam, c_bar=advantage.c_bar, **own))
        read_at_once(*readings)

    # --- single trajectories ------------------------------------------------------------------------------------

    def watch(self, places: Collection[int]) -> None:
        """Note ratios and advantages of the trajectories at these places, as they are first trained on."""
        self._watched = places
        plan, none = self._plan, torch.zeros(0)
        known, left_out = plan.known_advantages, set(plan.left_out)
        self._seen = {
            place: (none, known[place].expand(plan.rows[place].num_action_tokens))
            for place in places if place in left_out and not known[place].isnan()
        }

    def watched(self, place: int, num_tokens: int) -> tuple[list[float], list[float]]:
        """Ratios pi/mu and advantages of the trajectory's action tokens; no ratios if it got no pass."""
        if place not in self._seen:
            return [], []
        log_ratios, advantages = self._seen[place]
        return log_ratios[:num_tokens].exp().tolist(), advantages[:num_tokens].tolist()


@dataclass(slots=True)
class _Sums:
    num_tokens: int = 0
    difference: float = 0.0
    num_drawn: int = 0
    num_other: int = 0


class Agreements:
    """Agreement of actors' records with the learner's passes, for the hub to judge: sums by group and actor.

    They are of the passes of one batch, which cost nothing, and of audits.

    Args:
        rows: the trajectories of the batch on this rank.
    """

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = rows
        self._measured: set[int] = set()
        self._sums: dict[tuple[int, str, int], _Sums] = {}
        self.mismatches: dict[int, Tensor] = {}  # place of an audited row -> log pi_v - log mu of its tokens, [A]

    def measure(self, tokens: TokenBatch) -> Reading:
        """A pass over some of them; each counts once, as it is first trained on."""
        places = tokens.micro.trajectory_ids
        differences = tokens.recorded_log_ratios.abs().double().sum(1)
        sums = yield differences, tokens.mask.sum(1), (tokens.lags * tokens.mask).amax(1)
        for place, difference, num_tokens, lag in zip(places, *(one.tolist() for one in sums), strict=True):
            if place not in self._measured:
                self._measured.add(place)
                self.add(self._rows[place], lag, num_tokens, difference)

    def add(
        self, row: Trajectory, lag: int, num_tokens: int, difference: float, num_drawn: int = 0, num_other: int = 0
    ) -> None:
        """`difference` is the sum of |log-ratio| over the tokens; one that is not finite says nothing of the actor."""
        if not math.isfinite(difference):
            return  # recorded log-probs are finite, so it is the learner that has trouble
        sums = self._sums.setdefault((row.group_id, row.actor_id, lag), _Sums())
        sums.num_tokens += num_tokens
        sums.difference += difference
        sums.num_drawn += num_drawn
        sums.num_other += num_other

    def take(self, ranks: Ranks) -> tuple[Agreement, ...]:
        """The agreements of all ranks, on every rank; a collective call."""
        mine = [
            Agreement(actor_id, lag, one.num_tokens, one.difference / one.num_tokens, one.num_drawn, one.num_other)
            for (_, actor_id, lag), one in self._sums.items() if actor_id and one.num_tokens
        ]
        self._sums = {}
        everyone = ranks.gather_bytes(msgspec.msgpack.encode(mine))
        return tuple(one for part in everyone for one in msgspec.msgpack.decode(part, type=list[Agreement]))
