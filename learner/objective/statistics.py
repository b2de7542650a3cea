"""Per-step training statistics, measured beside the loss of each micro-batch.

Only sums, counts, extremes and histograms leave a micro-batch, so that every split into micro-batches and ranks gives
the same result. All scalars of one micro-batch go to the host in a single copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.data.trajectories import Trajectory
from learner.objective.masks import TokenMasks
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import lag_summary, trace_length
from streamrl.algorithms.checks import LOG_BOUND
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter
from streamrl.metrics.names import METRICS, member

RATIO_CAP = 2.0
"""Cap of `ess/sequence_clipped`; of `ratio/share_truncated` where the surrogate has none."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """What the stages of the loss made of one micro-batch; all [S, A]."""

    advantages: Tensor  # detached
    masks: TokenMasks
    lag_weights: Tensor | None  # factors on the losses of old tokens; None if all are 1
    clipped: Tensor  # bool, the trust region removed or bounded the token's gradient
    losses: Tensor  # differentiable, every weight applied and every regularizer added


@torch.no_grad()
def measure(meter: Meter, tokens: TokenBatch, terms: LossTerms, *, version: int, cap: float = RATIO_CAP) -> None:
    """Add one micro-batch to `meter`."""
    groups = {**_ratio_sums(tokens, terms.masks.keep, cap), **_loss_sums(tokens, terms)}
    names = list(groups)
    sums = dict(zip(names, torch.stack([groups[name].double() for name in names]).tolist(), strict=True))
    num_tokens, kept = sums["tokens"], sums["kept"]
    for key in ("ratio/mean_token", "ess/kept_fraction", "ratio/share_truncated", "ratio/share_at_bound", "drift/m2",
                "drift/k1", "drift/k3", "policy/loss", "policy/clip_fraction", "entropy/mean",
                *(f"keep/{cause}" for cause in terms.masks.removed)):
        count = kept if key == "ratio/mean_token" else num_tokens
        meter.add(key, sums[key] / max(count, 1.0), count)
    if "lag/weight" in sums:
        meter.add("lag/weight", sums["lag/weight"] / max(1.0, num_tokens), num_tokens)
    meter.add("ratio/mean_sequence", sums["sequence"] / max(sums["rows"], 1.0), sums["rows"])
    meter.add("drift/mismatch", sums["mismatch"] / max(sums["lag0"], 1.0), sums["lag0"])
    meter.add("ratio/max", sums["ratio/max"])
    meter.add_moments("ess/token", kept, sums["ratio/mean_token"], sums["token_squares"])
    meter.add_moments("ess/sequence", sums["rows"], sums["sequence"], sums["sequence_squares"])
    meter.add_moments("ess/sequence_clipped", sums["rows"], sums["clipped_sequence"], sums["clipped_sequence_squares"])
    meter.add("advantage/mean", sums["advantage"] / max(num_tokens, 1.0), num_tokens)
    meter.add_moments("advantage/std", num_tokens, sums["advantage"], sums["advantage_squares"])
    for sign in ("positive", "negative"):
        meter.add(f"clip/{sign}", sums[f"clip/{sign}"] / max(sums[sign], 1.0), sums[sign])
    removed = terms.masks.removed
    _add_lags(meter, tokens, tokens.mask & ~removed["lag"] if "lag" in removed else tokens.mask, version)


def _ratio_sums(tokens: TokenBatch, keep: Tensor, cap: float) -> dict[str, Tensor]:
    """Sums over kept tokens and rows (the ratios) and over all action tokens (the drift)."""
    mask, log_ratios = tokens.mask, tokens.log_ratios
    wide = log_ratios.double()
    ratio = wide.exp() * mask
    weight = ratio * keep
    rows = keep.any(1)
    sequence = (wide * keep).sum(1).clamp(-LOG_BOUND, LOG_BOUND).exp() * rows
    clipped = sequence.clamp(max=RATIO_CAP)  # the controllers compare steps: one cap, whatever the surrogate's
    square = wide.square()
    at_lag_0 = mask & (tokens.lags == 0)
    return {
        "tokens": mask.sum(), "kept": keep.sum(), "rows": rows.sum(), "lag0": at_lag_0.sum(),
        "ess/kept_fraction": keep.sum(),
        "ratio/mean_token": weight.sum(), "token_squares": weight.square().sum(), "ratio/max": ratio.max(),
        "sequence": sequence.sum(), "sequence_squares": sequence.square().sum(),
        "clipped_sequence": clipped.sum(), "clipped_sequence_squares": clipped.square().sum(),
        "ratio/share_truncated": (ratio > cap).sum(), "ratio/share_at_bound": (log_ratios.abs() >= LOG_BOUND).sum(),
        "drift/m2": square.sum(), "mismatch": (square * at_lag_0).sum(), "drift/k1": -wide.sum(),
        # expm1 keeps the digits that exp(log_ratios) - 1 loses for fresh data
        "drift/k3": (torch.expm1(wide) - log_ratios).sum(),
    }


def _loss_sums(tokens: TokenBatch, terms: LossTerms) -> dict[str, Tensor]:
    assert tokens.entropy is not None
    advantages, lag_weights = terms.advantages.double(), terms.lag_weights
    positive, negative = tokens.mask & (advantages > 0), tokens.mask & (advantages < 0)
    return {
        **{f"keep/{cause}": dropped.sum() for cause, dropped in terms.masks.removed.items()},
        **({} if lag_weights is None else {"lag/weight": lag_weights.sum()}),
        "policy/loss": (terms.losses.double() * terms.masks.keep).sum(),
        "policy/clip_fraction": terms.clipped.sum(), "entropy/mean": tokens.entropy.double().sum(),
        "advantage": advantages.sum(), "advantage_squares": advantages.square().sum(),
        "positive": positive.sum(), "negative": negative.sum(),
        "clip/positive": (terms.clipped & positive).sum(), "clip/negative": (terms.clipped & negative).sum(),
    }


def _add_lags(meter: Meter, tokens: TokenBatch, fresh: Tensor, version: int) -> None:
    """Histograms and means of the lag, and the drift by lag, over the tokens that their lag does not exclude."""
    lags = tokens.lags[fresh]
    if not lags.numel():
        return
    squares = torch.bincount(lags, weights=tokens.log_ratios[fresh].double().square()).tolist()
    counts = torch.bincount(lags).tolist()
    for lag, (count, square) in enumerate(zip(counts, squares, strict=True)):
        if count:
            meter.add("lag/token", lag, count)
            meter.add("lag/token_mean", lag, count)
            meter.add_at("drift/m2_by_lag", lag, square / count, count)
    meter.add("lag/token_max", len(counts) - 1)
    rows = fresh.any(1)
    summary = lag_summary(tokens.micro.versions, version, fresh)
    heads, tails = summary.head[rows].tolist(), summary.tail[rows].tolist()
    meter.add_histogram("lag/head", Counter(heads))
    meter.add("lag/head_max", max(heads))
    # The last token was sampled by the version that finished the trajectory: what came later is the queue.
    head, tail = sum(heads) / len(heads), sum(tails) / len(tails)
    means = {"lag/head_mean": head, "lag/queue": tail, "lag/flight": head - tail, "lag/span": head - tail}
    meter.add_all(means, weight=len(heads))


def measure_traces(meter: Meter, tokens: TokenBatch, *, lam: float, c_bar: float) -> None:
    """Effective trace length of V-trace: how many later tokens still reach a token's advantage."""
    lengths = trace_length(tokens.log_ratios.cpu(), tokens.mask.cpu(), lam=lam, c_bar=c_bar)
    counts = tokens.mask.sum(1).cpu()
    lengths, counts = lengths[counts > 0].double(), counts[counts > 0]
    if lengths.numel():
        means = {"trace/length": lengths.mean(), "trace/fraction": (2.0 * lengths / (counts + 1)).mean()}
        meter.add_all({key: float(value) for key, value in means.items()}, weight=lengths.numel())


def add_plan(meter: Meter, plan: Sequence[PlanRow]) -> None:
    """What is known of the whole batch from its plan; one rank adds it."""
    by_group: dict[int, list[PlanRow]] = {}
    for row in plan:
        by_group.setdefault(row.group_id, []).append(row)
    num_rows, num_tokens = len(plan), sum(row.num_action_tokens for row in plan)
    rewards = [row.reward for row in plan]
    means = {
        "reward/mean": _mean(rewards), "rollout/reward/train": _mean(rewards),
        "length/consumed": num_tokens / max(1, num_rows),
        "rollout/response_tokens/train": num_tokens / max(1, num_rows),
        "lag/head_groups": _mean([row.head_lag for row in plan]) * len(by_group),
    }
    meter.add_all(means, weight=num_rows)
    meter.add_moments("reward/std", num_rows, sum(rewards), sum(reward * reward for reward in rewards))
    for rows in by_group.values():
        heads, scores = [row.head_lag for row in rows], [row.reward for row in rows]
        meter.add("lag/group_spread", max(heads) - min(heads))
        meter.add("group/zero_std_fraction", float(max(scores) == min(scores)))
    meter.add_all({
        "policy/num_trajectories": num_rows, "policy/num_groups": len(by_group), "policy/num_tokens": num_tokens
    })


def add_trajectories(meter: Meter, trajectories: Sequence[Trajectory]) -> None:
    """What only the rank that holds a trajectory knows of it."""
    truncated = _mean([row.truncated for row in trajectories])
    turns = _mean([row.num_turns for row in trajectories])
    means = {"length/truncated_fraction": truncated, "rollout/length_clip_ratio/train": truncated}
    meter.add_all({**means, "rollout/num_turns/train": turns}, weight=len(trajectories))
    for row in trajectories:
        for name, value in row.scores.items():
            key = "rollout/score/train" if name == "score" else member("reward", name)
            if key == "rollout/score/train" or key not in METRICS:  # a part named "mean" must not pose as the mean
                meter.add(key, value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
