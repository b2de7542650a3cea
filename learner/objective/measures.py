"""Per-step training statistics, measured beside the loss of each micro-batch.

Only sums, counts, extremes and histograms leave a micro-batch, so that every split into micro-batches and ranks gives
the same result. What the host needs of one micro-batch goes there in a single copy (`learner.data.transfer`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from learner.data.packing import versions_of
from learner.data.trajectories import Trajectory
from learner.data.transfer import Reading
from learner.objective.loss import LossTerms
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import lag_summary, trace_length
from streamrl.algorithms.checks import LOG_BOUND
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter
from streamrl.metrics.names import METRICS, member

RATIO_CAP = 2.0
"""Cap of `ess/sequence_clipped` and `ess/token_clipped`; of `ratio/share_truncated` where the surrogate has none."""


def measure(meter: Meter, tokens: TokenBatch, terms: LossTerms, *, version: int, cap: float = RATIO_CAP) -> Reading:
    """Add one micro-batch to `meter`."""
    sums, removed = _sums(tokens, terms, cap), terms.masks.removed
    # Histograms are counted on the host: on a GPU each count and selection would wait for the device.
    scalars, fresh, versions, lags, log_ratios, *sizes = yield (
        torch.stack([x.double() for parts in sums.values() for x in parts]),
        tokens.mask & ~removed["lag"] if "lag" in removed else tokens.mask,
        tokens.micro.versions,
        tokens.lags,
        tokens.log_ratios,
        *(() if tokens.micro.sets is None else (tokens.micro.sets.sizes,)),
    )
    values = iter(scalars.tolist())
    for key, parts in sums.items():
        match [next(values) for _ in parts]:
            case [largest]:
                meter.add(key, largest)
            case [total, count]:
                meter.add(key, total / max(count, 1.0), count)
            case moments:
                meter.add_moments(key, *moments)
    add_lags(meter, versions, fresh, version)
    _add_drift_by_lag(meter, lags[fresh], log_ratios[fresh])
    for of_sets in sizes:
        meter.add("rollout/set_size", float(of_sets.double().mean()), len(of_sets))
        meter.add("rollout/set_size_max", int(of_sets.max()))


def _sums(tokens: TokenBatch, terms: LossTerms, cap: float) -> dict[str, tuple[Tensor, ...]]:
    """Metric -> (largest,), (sum, count) or (count, sum, sum of squares).

    Ratios are summed over kept tokens and rows, the drift over all action tokens.
    """
    mask, keep, log_ratios, entropy = tokens.mask, terms.masks.keep, tokens.log_ratios, tokens.entropy
    assert entropy is not None, "statistics are those of the loss, not of the scoring pass"
    wide, advantages, clipped = log_ratios.double(), terms.advantages.double(), terms.clipped
    ratio, square = wide.exp() * mask, wide.square()
    weight, rows = ratio * keep, keep.any(1)
    sequence = (wide * keep).sum(1).clamp(-LOG_BOUND, LOG_BOUND).exp() * rows
    # Controllers compare steps: one cap, whatever the surrogate's.
    short, truncated = weight.clamp(max=RATIO_CAP), sequence.clamp(max=RATIO_CAP)
    num_tokens, num_kept, num_rows = mask.sum(), keep.sum(), rows.sum()
    at_lag_0 = mask & (tokens.lags == 0)
    per_token = {
        "ess/kept_fraction": num_kept, "ratio/share_truncated": (ratio > cap).sum(),
        "ratio/share_at_bound": (log_ratios.abs() >= LOG_BOUND).sum(), "drift/m2": square.sum(),
        "drift/k1": -wide.sum(),
        # expm1 keeps the digits that exp(log_ratios) - 1 loses for fresh data
        "drift/k3": (torch.expm1(wide) - log_ratios).sum(),
        "policy/loss": (terms.losses.double() * keep).sum(), "policy/clip_fraction": clipped.sum(),
        "entropy/mean": entropy.double().sum(), "advantage/mean": advantages.sum(),
        **{f"keep/{cause}": dropped.sum() for cause, dropped in terms.masks.removed.items()},
    }
    if terms.lag_weights is not None:
        per_token["lag/weight"] = terms.lag_weights.sum()
    sums = {
        **{key: (total, num_tokens) for key, total in per_token.items()},
        "ratio/max": (ratio.max(),),
        "ratio/mean_token": (weight.sum(), num_kept), "ratio/mean_sequence": (sequence.sum(), num_rows),
        "drift/mismatch": ((tokens.recorded_log_ratios.double().square() * at_lag_0).sum(), at_lag_0.sum()),
        "ess/token": (num_kept, weight.sum(), weight.square().sum()),
        "ess/token_clipped": (num_kept, short.sum(), short.square().sum()),
        "ess/sequence": (num_rows, sequence.sum(), sequence.square().sum()),
        "ess/sequence_clipped": (num_rows, truncated.sum(), truncated.square().sum()),
        "advantage/std": (num_tokens, advantages.sum(), advantages.square().sum()),
    }
    for sign, chosen in (("positive", mask & (advantages > 0)), ("negative", mask & (advantages < 0))):
        sums[f"clip/{sign}"] = (clipped & chosen).sum(), chosen.sum()
    return sums


def _add_drift_by_lag(meter: Meter, lags: Tensor, log_ratios: Tensor) -> None:
    squares = torch.bincount(lags, weights=log_ratios.double().square()).tolist()
    for lag, (count, square) in enumerate(zip(torch.bincount(lags).tolist(), squares, strict=True)):
        if count:
            meter.add_at("drift/m2_by_lag", lag, square / count, count)


def add_lags(meter: Meter, versions: Tensor, fresh: Tensor, version: int) -> None:
    """Histograms and means of the lag over the tokens that their lag does not exclude; int64 and bool [S, A]."""
    counts = torch.bincount((version - versions)[fresh]).tolist()
    if not counts:
        return
    for lag, count in enumerate(counts):
        if count:
            meter.add("lag/token", lag, count)
            meter.add("lag/token_mean", lag, count)
    meter.add("lag/token_max", len(counts) - 1)
    rows = fresh.any(1)
    summary = lag_summary(versions, version, fresh)
    heads, tails = summary.head[rows].tolist(), summary.tail[rows].tolist()
    meter.add_histogram("lag/head", Counter(heads))
    meter.add("lag/head_max", max(heads))
    # The last token was sampled by the version that finished the trajectory: what came later is the queue.
    head, tail = sum(heads) / len(heads), sum(tails) / len(tails)
    means = {"lag/head_mean": head, "lag/queue": tail, "lag/flight": head - tail, "lag/span": head - tail}
    meter.add_all(means, weight=len(heads))


def measure_split(meter: Meter, tokens: TokenBatch, mismatches: Mapping[int, Tensor]) -> Reading:
    """The log-ratio of audited tokens in two: what the engine added, and how far the policy has moved since.

    `log pi - log mu = (log pi - log pi_v) + (log pi_v - log mu)`, v the version that sampled; after arXiv:2605.12070.
    """
    chosen = [(row, place) for row, place in enumerate(tokens.micro.trajectory_ids) if place in mismatches]
    if not chosen:
        return
    log_ratios, counts, *of_engine = yield (
        tokens.recorded_log_ratios, tokens.mask.sum(1), *(mismatches[place] for _, place in chosen)
    )
    for (row, _), engine in zip(chosen, of_engine, strict=True):
        if count := int(counts[row]):
            engine = engine[:count].double()
            moved = log_ratios[row, :count].double() - engine
            meter.add("drift/audited_engine", float(engine.square().mean()), count)
            meter.add("drift/audited_policy", float(moved.square().mean()), count)


def measure_traces(meter: Meter, tokens: TokenBatch, **knobs: float) -> Reading:
    """Effective trace length of V-trace with these knobs: how many later tokens still reach a token's advantage."""
    log_ratios, mask = yield tokens.log_ratios, tokens.mask
    lengths, counts = trace_length(log_ratios, mask, **knobs), mask.sum(1)
    lengths, counts = lengths[counts > 0].double(), counts[counts > 0]
    if lengths.numel():
        means = {"trace/length": lengths.mean(), "trace/fraction": (2.0 * lengths / (counts + 1)).mean()}
        meter.add_all({key: float(value) for key, value in means.items()}, weight=lengths.numel())


def add_plan(meter: Meter, plan: Sequence[PlanRow]) -> None:
    """Add the statistics of the whole batch that its plan holds; one rank does so."""
    by_group: dict[int, list[PlanRow]] = {}
    for row in plan:
        by_group.setdefault(row.group_id, []).append(row)
    num_rows, num_tokens = len(plan), sum(row.num_action_tokens for row in plan)
    rewards = [row.reward for row in plan]
    means = {
        "reward/trained": _mean(rewards),
        "length/consumed": num_tokens / max(1, num_rows),
        "rollout/response_tokens/train": num_tokens / max(1, num_rows),
        "lag/head_groups": _mean([row.head_lag for row in plan]) * len(by_group),
    }
    meter.add_all(means, weight=num_rows)
    for rows in by_group.values():
        heads, scores = [row.head_lag for row in rows], [row.reward for row in rows]
        meter.add("lag/group_spread", max(heads) - min(heads))
        if len(scores) > 1:  # a single answer has no siblings to differ from
            meter.add("group/zero_std_trained", float(max(scores) == min(scores)))
    meter.add_all({
        "policy/num_trajectories": num_rows, "policy/num_groups": len(by_group), "policy/num_tokens": num_tokens
    })


def add_trajectories(meter: Meter, trajectories: Sequence[Trajectory]) -> None:
    """Add the statistics that only the rank knows that holds a trajectory."""
    truncated = _mean([row.truncated for row in trajectories])
    turns = _mean([row.num_turns for row in trajectories])
    sequences = 1.0 + _mean([len(row.later) for row in trajectories])
    means = {"length/truncated_fraction": truncated, "rollout/length_clip_ratio/train": truncated}
    means |= {"rollout/num_turns/train": turns, "rollout/sequences_per_trajectory": sequences}
    meter.add_all(means, weight=len(trajectories))
    for row in trajectories:
        for name, value in row.scores.items():
            key = "score/trained" if name == "score" else member("reward", name)
            if key == "score/trained" or key not in METRICS:  # a part named "mean" must not pose as the mean
                meter.add(key, value)


def add_left_out(
    meter: Meter, left_out: Sequence[Trajectory], *, num_tokens: int, version: int, advantages: Tensor,
    oldest_lags: Tensor | None,
) -> None:
    """Add the statistics of trajectories that get no pass; the mean loss counts them as 0.

    Ratios, drift, ESS and entropy are then those of the other trajectories.

    Args:
        left_out: L trajectories.
        advantages: [L] of every token of each; NaN where only a pass would tell, which leaves it out of the statistics.
        num_tokens: action tokens of all trajectories of this rank.
        oldest_lags: int64 [L] tokens of a larger lag are masked; None masks none.
    """
    num_left_out = sum(row.num_action_tokens for row in left_out)
    meter.add("policy/left_out_fraction", num_left_out / max(1, num_tokens), num_tokens)
    if not num_left_out:
        return
    meter.add("policy/loss", 0.0, num_left_out)
    for row, advantage in zip(left_out, advantages.tolist(), strict=True):
        if count := 0 if math.isnan(advantage) else row.num_action_tokens:
            meter.add("advantage/mean", advantage, count)
            meter.add_moments("advantage/std", count, count * advantage, count * advantage**2)
    versions, mask = versions_of(left_out)
    if oldest_lags is not None:
        fresh = mask & (version - versions <= oldest_lags[:, None])
        meter.add("keep/lag", float((mask & ~fresh).sum()) / num_left_out, num_left_out)
        mask = fresh
    add_lags(meter, versions, mask, version)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
