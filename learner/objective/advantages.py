"""Credit: what each token is told of its trajectory's reward, by the estimator that the settings name.

Estimators leave the token's own importance ratio out; the surrogate carries it (two exceptions say so themselves and
pair only with `reinforce`). Those that look one step ahead (V-trace, Retrace, GAE ...) also make the targets that the
critic is trained on.

    group scores   -> baseline, scale -> one number a row -> broadcast, suffix product, or whitened
    token rewards  -> recursion over values of the critic  -> advantages and targets

Legend: S trajectories of a micro-batch, A most action tokens of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.objective.scoring_pass import PassOutputs
from streamrl.algorithms import (
    ESTIMATORS,
    broadcast_rows,
    place_terminal,
    reinforce_pp_advantages,
    vtrace_critic_free,
    whiten,
)
from streamrl.algorithms.types import Moments
from streamrl.config.schema import AdvantageConfig, Discount, Segment

CRITIC_FREE = ("group", "reinforce_pp", "vtrace_critic_free")
"""Estimators that need nothing but rewards and log-probs."""
OFF_POLICY = ("vtrace", "vtrace_segments", "retrace_v", "retrace_q", "clipped_is")
"""Estimators with a critic whose arguments begin with behavior and policy log-probs."""
SETTINGS: Mapping[str, float | None] = MappingProxyType(
    {"gamma": 1.0, "lam": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "rho_bar_pg": None}
)
"""Settings that are an estimator's argument of the same name, and the value at which they say nothing."""
_GIVEN = {"bootstrap_values", "moments", "mask", "baseline", "scale", *SETTINGS}


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """Advantages [S, A]; targets [S, A] of the critic and the tokens it is trained on, if the estimator has any."""

    advantages: Tensor
    targets: Tensor | None = None
    trained: Tensor | None = None  # bool [S, A]


def accepted(estimator: str) -> set[str]:
    """Names of the keyword arguments that `ESTIMATORS[estimator]` takes."""
    parameters = inspect.signature(ESTIMATORS[estimator]).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def own_options(estimator: str) -> set[str]:
    """What `advantage.options` may hold for this estimator: its constants that no setting of their own names."""
    return set() if estimator in ("group", "reinforce_pp") else accepted(estimator) - _GIVEN


@torch.no_grad()
def credit_tokens(
    settings: AdvantageConfig, batch: MicroBatch, policy: Tensor, row_credit: Tensor, *, row_baseline: Tensor,
    rewards: Tensor, moments: Moments, scored: PassOutputs | None, rho_bar: float | None = None,
) -> Advantages:
    """Advantages of one micro-batch, detached, before whitening over the batch.

    Args:
        policy: [S, A] log-probs of the current policy.
        row_credit: [S] (score - baseline) / scale.
        row_baseline: [S] what `row_credit` subtracted; with a critic it centers the rewards of trajectories that ended.
        rewards: [S, A] per token, with whatever shapes them.
        moments: of the returns over the batch's tokens; only `reinforce_pp` reads them.
        scored: the critic's values, for estimators that need them.
        rho_bar: instead of the setting, when it follows the batch's effective sample size.
    """
    name, mask = settings.estimator, batch.mask
    if name == "group":
        return Advantages(broadcast_rows(row_credit, mask))
    if name == "reinforce_pp":
        if settings.baseline == "none":
            return Advantages(reinforce_pp_advantages(rewards, mask, gamma=discounts(settings, batch), moments=moments))
        return Advantages(whiten(broadcast_rows(row_credit, mask), mask, moments=moments))
    knobs = _knobs(settings, batch)
    if rho_bar is not None:
        knobs["rho_bar"] = rho_bar
    if name == "vtrace_critic_free":
        zero = torch.zeros_like(row_credit)
        return Advantages(vtrace_critic_free(batch.behavior_logprobs, policy, row_credit, zero, mask, **knobs))
    assert scored is not None and scored.values is not None, f"{name} needs the critic's values"
    # V predicts centered returns: where a cut trajectory is continued by V, the baseline is in there already.
    charged = row_baseline.to(rewards.dtype).index_fill(0, batch.bootstrap_rows, 0.0)
    centered = rewards - place_terminal(charged, mask)
    # A recursion over time is thousands of tiny kernels on an accelerator, and one quick loop on the host.
    given = [policy, centered, scored.values, scored.bootstrap, scored.action_values]
    policy, centered, values, ends, actions = (None if x is None else x.cpu() for x in given)
    knobs = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in knobs.items()}
    found = _with_values(
        name, batch.to("cpu"), policy, centered, PassOutputs(values=values, bootstrap=ends, action_values=actions),
        settings, knobs,
    )
    back = (found.advantages, found.targets, found.trained)
    return Advantages(*(None if x is None else x.to(mask.device) for x in back))


def _with_values(
    name: str, batch: MicroBatch, policy: Tensor, rewards: Tensor, scored: PassOutputs, settings: AdvantageConfig,
    knobs: dict[str, Any],
) -> Advantages:
    mask, values = batch.mask, scored.values
    estimator, ends = ESTIMATORS[name], {"bootstrap_values": scored.bootstrap, **knobs}
    if name == "vtrace_segments":
        segments = segment_ids(batch, settings.segment, settings.segment_tokens)
        cut = estimator(batch.behavior_logprobs, policy, rewards, values, mask, segments, **ends)
        return Advantages(cut.advantages, cut.targets, cut.starts)
    if name == "retrace_q":
        returns = estimator(
            batch.behavior_logprobs, policy, rewards, scored.action_values, values, mask, **ends
        )
    elif name in OFF_POLICY:
        returns = estimator(batch.behavior_logprobs, policy, rewards, values, mask, **ends)
    else:
        returns = estimator(rewards, values, mask, **ends)
    return Advantages(returns.advantages, returns.targets, mask)


def segment_ids(batch: MicroBatch, kind: Segment, num_tokens: int) -> Tensor:
    """int64 [S, A], non-decreasing along a row: the turn of each token, or blocks of so many tokens inside a turn."""
    if kind is Segment.turn:
        return batch.turns
    places = torch.arange(batch.mask.shape[1], device=batch.mask.device).expand_as(batch.turns)
    first = torch.zeros_like(batch.turns)
    first[:, 1:] = torch.where(batch.turns[:, 1:] != batch.turns[:, :-1], places[:, 1:], 0)
    inside = places - first.cummax(1).values
    new = (inside % num_tokens == 0).long()
    return new.cumsum(1)


def _knobs(settings: AdvantageConfig, batch: MicroBatch) -> dict[str, Any]:
    takes = accepted(settings.estimator)
    knobs = {name: getattr(settings, name) for name in SETTINGS if name in takes}
    if "gamma" in knobs:
        knobs["gamma"] = discounts(settings, batch)
    if "target_rho_bar" in takes:  # the critic is one of states: the estimator's own None is meant for action values
        knobs["target_rho_bar"] = 1.0
    return {**knobs, **settings.options}


def discounts(settings: AdvantageConfig, batch: MicroBatch) -> float | Tensor:
    """The discount of every token, or of the last action token of every turn only."""
    if settings.discount is Discount.token or settings.gamma == 1.0 or settings.estimator == "vtrace_segments":
        return settings.gamma
    turns, mask = batch.turns, batch.mask
    ends = mask.clone()
    ends[:, :-1] &= (turns[:, 1:] != turns[:, :-1]) | ~mask[:, 1:]
    return torch.where(ends, settings.gamma, 1.0)
