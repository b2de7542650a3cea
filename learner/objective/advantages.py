"""Advantages of tokens, by the estimator that the settings name.

    group scores   -> baseline, scale -> one number per trajectory -> broadcast, suffix product, or whitened
    token rewards  -> recursion over values of the critic        -> advantages, and targets of the critic

Estimators leave the token's own importance ratio out, because the surrogate carries it; those that apply it themselves
pair only with surrogates that do not (`check_pairing`).

Legend: S trajectories of a micro-batch, A most action tokens of one, R trajectories of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.objective.options import ESTIMATOR_SETTINGS
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import Estimator, broadcast_rows, n_step, place_terminal, whiten
from streamrl.algorithms.types import Moments, Returns, SegmentReturns
from streamrl.config.schema import AdvantageConfig, Discount, Segment


@dataclass(frozen=True, slots=True, eq=False)
class RowAdvantages:
    """Advantages of whole trajectories, `(score - baseline) / scale`, and the baseline; [R] or [S].

    `moments` are those of the advantages over all action tokens of the batch. `turns` [R, U] or [S, U] are those of
    single turns, where agents of a trajectory have advantages of their own. `fraction_alone` of the batch's
    trajectories (or of the agents in them) had no other of their group to be compared with.
    """

    advantages: Tensor
    baseline: Tensor
    moments: Moments
    turns: Tensor | None = None
    fraction_alone: float = 0.0

    def of(self, micro: MicroBatch) -> RowAdvantages:
        """The advantages of a micro-batch's trajectories, float32 and on its device."""
        places, device = torch.tensor(micro.trajectory_ids), micro.mask.device
        advantages, baseline = (x[places].float().to(device) for x in (self.advantages, self.baseline))
        turns = None if self.turns is None else self.turns[places].float().to(device)
        return RowAdvantages(advantages, baseline, self.moments, turns)

    def of_tokens(self, micro: MicroBatch) -> Tensor:
        """Advantages of every action token of the same micro-batch, [S, A]."""
        if self.turns is None:
            return broadcast_rows(self.advantages, micro.mask)
        return self.turns.gather(1, micro.turns) * micro.mask


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """Advantages [S, A]; with a critic also its targets [S, A], the tokens it is trained on, and the returns."""

    advantages: Tensor
    targets: Tensor | None = None
    trained: Tensor | None = None  # bool [S, A]
    returns: Tensor | None = None  # [S, A] discounted sums of the rewards, as they were recorded


@torch.no_grad()
def token_advantages(
    settings: AdvantageConfig, estimator: Estimator, tokens: TokenBatch, rows: RowAdvantages, rewards: Tensor, *,
    rho_bar: float | None = None,
) -> Advantages:
    """Advantages of one micro-batch, detached, before whitening over the batch.

    Args:
        estimator: the entry that `settings` names.
        rows: of the micro-batch's trajectories. With a critic their baseline centers the rewards.
        rewards: [S, A], with whatever shapes them.
        rho_bar: instead of the setting, when it follows the batch's effective sample size.
    """
    micro, mask, outputs = tokens.micro, tokens.mask, tokens.outputs
    if estimator.of_rows:  # computed for the whole batch already, since siblings may be on other ranks
        return Advantages(rows.of_tokens(micro))
    if estimator.whitens and settings.baseline != "none":
        return Advantages(whiten(broadcast_rows(rows.advantages, mask), mask, moments=rows.moments))
    # Every input that an estimator may name; it picks those that are parameters of its function.
    given = {
        "behavior_logprobs": tokens.behavior, "policy_logprobs": tokens.policy.detach(), "rewards": rewards,
        "mask": mask, "scores": rows.advantages, "baselines": torch.zeros_like(rows.advantages),
        "moments": rows.moments,
    }
    knobs = _knobs(settings, estimator, micro)
    if rho_bar is not None:
        knobs["rho_bar"] = rho_bar
    if estimator.of_segments:
        given["segment_ids"] = segment_ids(micro, settings.segment, settings.segment_tokens)
    if not estimator.needs_critic:
        return _result(estimator(given, **knobs), mask)
    assert outputs.values is not None, f"advantage.estimator={settings.estimator} needs the critic's values"
    # V predicts centered returns: where a cut trajectory is continued by V, the baseline is in there already.
    charged = rows.baseline.to(rewards.dtype).index_fill(0, micro.bootstrap_rows, 0.0)
    rewards = rewards - place_terminal(charged, mask)
    given |= {
        "rewards": rewards, "values": outputs.values,
        "bootstrap_values": outputs.bootstrap, "q_values": outputs.action_values, "expected_q": outputs.values,
    }
    # A recursion over time is thousands of tiny kernels on an accelerator, and one quick loop on the host.
    given, knobs = _moved(given, "cpu"), _moved(knobs, "cpu")
    found = _result(estimator(given, **knobs), given["mask"])
    found = replace(found, returns=_returns(settings, given, knobs.get("gamma", 1.0)))
    return Advantages(**_moved({name: getattr(found, name) for name in Advantages.__slots__}, mask.device))


def _returns(settings: AdvantageConfig, given: Mapping[str, Any], gamma: float | Tensor) -> Tensor:
    """Discounted sums of the rewards to the end [S, A]; segments are discounted where they end."""
    mask = given["mask"]
    if "segment_ids" in given:
        gamma = torch.where(_ends(given["segment_ids"], mask), settings.gamma, 1.0)
    return n_step(
        given["rewards"], given["values"], mask, bootstrap_values=given["bootstrap_values"], gamma=gamma,
        n=max(1, mask.shape[1]),
    ).targets


def _moved(values: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}


def _result(found: Tensor | Returns | SegmentReturns, mask: Tensor) -> Advantages:
    if isinstance(found, Tensor):
        return Advantages(found)
    return Advantages(found.advantages, found.targets, found.starts if isinstance(found, SegmentReturns) else mask)


def segment_ids(micro: MicroBatch, kind: Segment, num_tokens: int) -> Tensor:
    """int64 [S, A], non-decreasing along a row: the turn of each token, or blocks of so many tokens inside a turn."""
    if kind is Segment.turn:
        return micro.turns
    places = torch.arange(micro.mask.shape[1], device=micro.mask.device).expand_as(micro.turns)
    first = torch.zeros_like(micro.turns)
    first[:, 1:] = torch.where(micro.turns[:, 1:] != micro.turns[:, :-1], places[:, 1:], 0)
    inside = places - first.cummax(1).values
    return (inside % num_tokens == 0).long().cumsum(1)


def _knobs(settings: AdvantageConfig, estimator: Estimator, micro: MicroBatch) -> dict[str, Any]:
    knobs = {name: getattr(settings, name) for name in ESTIMATOR_SETTINGS if name in estimator.knobs}
    if "gamma" in knobs:
        knobs["gamma"] = discounts(settings, estimator, micro)
    if "target_rho_bar" in estimator.knobs:  # the function's own None is meant for critics of action values
        knobs["target_rho_bar"] = 1.0
    return {**knobs, **settings.options}


def discounts(settings: AdvantageConfig, estimator: Estimator, micro: MicroBatch) -> float | Tensor:
    """The discount of every token, or of the last action token of every turn only."""
    # Segments are discounted once each, by the estimator itself.
    if settings.discount is Discount.token or settings.gamma == 1.0 or estimator.of_segments:
        return settings.gamma
    return torch.where(_ends(micro.turns, micro.mask), settings.gamma, 1.0)


def _ends(ids: Tensor, mask: Tensor) -> Tensor:
    """bool [S, A], the last action token of every turn or segment."""
    ends = mask.clone()
    ends[:, :-1] &= (ids[:, 1:] != ids[:, :-1]) | ~mask[:, 1:]
    return ends
