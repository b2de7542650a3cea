"""Lag, drift of the policy with lag, and the controllers of lag bound, step size and clip that read them.

Version n is the number of optimizer steps done; a batch whose update produces n + 1 trains at version n, and a token of
version v has lag `n - v`. A batch holds tokens of many lags; the second moment of their log-ratios,
`m2(d) = E[ell^2 | lag d]`, is kept per lag bin and forgotten exponentially: it predicts the cost of a larger lag before
it is allowed. Controllers take a state with one measurement (a detached global mean) and return the next state; a
caller steps them once per optimizer step. States are Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from streamrl.algorithms.checks import LOG_BOUND, check_alike, check_tokens, read, read_log_ratios, require
from streamrl.algorithms.types import (
    BreakerState,
    ClipBounds,
    DriftBins,
    DriftFit,
    DriftModel,
    GoodputState,
    LagBound,
    LagSummary,
)

__all__ = [
    "clip_from_budget", "fit_drift", "goodput", "lag_for_ess", "lag_keep", "lag_summary", "lag_weights", "lr_scale",
    "oscillation", "predict_m2", "rho_bar_for_ess", "should_publish", "split_by_lag", "spread_budget", "step_breaker",
    "step_goodput", "step_lag_bound", "token_lags", "update_drift", "zscore_keep",
]


@torch.no_grad()
def token_lags(versions: Tensor, version: int, mask: Tensor) -> Tensor:
    """`version - versions` per action token, 0 elsewhere; int64 [B, T]. A negative lag is a fault: a future version."""
    check_tokens(mask, versions=versions)
    lags = version - versions.long()
    return torch.where(mask, lags, torch.zeros_like(lags))


@torch.no_grad()
def lag_summary(versions: Tensor, version: int, mask: Tensor) -> LagSummary:
    """Lag of each row's oldest and newest action token; see `LagSummary`."""
    lags = token_lags(versions, version, mask)
    if not mask.shape[1]:
        return LagSummary(head=lags.sum(1), tail=lags.sum(1))
    extreme, occupied = torch.iinfo(torch.int64).max, mask.any(1)
    head = torch.where(mask, lags, -extreme).amax(1)
    tail = torch.where(mask, lags, extreme).amin(1)
    return LagSummary(head=torch.where(occupied, head, 0), tail=torch.where(occupied, tail, 0))


@torch.no_grad()
def lag_keep(lags: Tensor, mask: Tensor, *, max_lag: int | Tensor) -> Tensor:
    """Action tokens with `0 <= lag <= max_lag`; bool [B, T]. Masks the too-old prefix instead of dropping the row.

    `max_lag` may be int64 [B, 1]: a bound for each trajectory, which is not read.
    """
    require(isinstance(max_lag, Tensor) or max_lag >= 0, f"max_lag={max_lag} must not be negative")
    check_tokens(mask, lags=lags)
    return mask & (lags >= 0) & (lags <= max_lag)


@torch.no_grad()
def lag_weights(lags: Tensor, mask: Tensor, *, max_lag: int, decay: float) -> Tensor:
    """`decay ** (lag - max_lag)` on tokens older than max_lag, 1 on the others; float32 [B, T], 0 off the mask.

    Multiplies token losses whose denominator stays: old tokens count less, the others no more than before.
    """
    require(max_lag >= 0, f"max_lag={max_lag} must not be negative")
    require(0.0 <= decay <= 1.0, f"decay={decay} must lie in [0, 1]")
    check_tokens(mask, lags=lags)
    beyond = torch.where(mask, lags - max_lag, torch.zeros_like(lags)).clamp(min=0)
    return torch.pow(torch.tensor(decay, device=lags.device), beyond) * mask


def split_by_lag(group_ids: Tensor, head_lags: Tensor, *, budget: int) -> Tensor:
    """New group numbers in which no group spreads over more than `budget` optimizer steps of head lag; int64 [B].

    A group is cut into runs of neighboring lags, youngest first, each as long as the budget allows; groups within it
    stay whole. Rows of a sub-group are compared with each other only, because policies that far apart have no common
    mean.
    """
    require(budget >= 0, f"budget={budget} must not be negative")
    check_alike(group_ids=group_ids, head_lags=head_lags)
    order = sorted(range(len(group_ids)), key=lambda i: (int(group_ids[i]), int(head_lags[i])))
    result = torch.zeros_like(group_ids, dtype=torch.int64)
    number, first = -1, (None, 0)
    for i in order:
        group, lag = int(group_ids[i]), int(head_lags[i])
        if group != first[0] or lag - first[1] > budget:
            number, first = number + 1, (group, lag)
        result[i] = number
    return result


_LEAST_SHARE = 1e-3  # of all tokens that a bin remembers


def update_drift(model: DriftModel | None, bins: DriftBins, *, half_life: float = 30.0) -> DriftModel:
    """The model after one more batch; old tokens count half after `half_life` steps. `model` None starts one."""
    require(half_life > 0.0, f"half_life={half_life} must be positive")
    if model is None:
        return DriftModel(lag=bins.lag, count=bins.count, m2=bins.m2, standard_error=bins.standard_error)
    require(
        len(model.lag) == len(bins.lag),
        f"model has {len(model.lag)} bins but the batch has {len(bins.lag)}: the edges must not change",
    )
    decay = 0.5 ** (1.0 / half_life)
    merged = [_merge(old, new, decay) for old, new in zip(_bins(model), _bins(bins), strict=True)]
    return DriftModel(*zip(*merged, strict=True))


def _bins(table: DriftBins | DriftModel) -> Iterator[tuple[float, float, float, float]]:
    """(lag, count, m2, standard error) of each bin."""
    return zip(table.lag, table.count, table.m2, table.standard_error, strict=True)


def _merge(old: tuple[float, ...], new: tuple[float, ...], decay: float) -> tuple[float, float, float, float]:
    """Count-weighted mean of two bins (lag, count, m2, standard error), the old one discounted."""
    weight, added = decay * old[1], new[1]
    total = weight + added
    if total <= 0.0:
        return new[0], 0.0, 0.0, 0.0
    lag = (weight * old[0] + added * new[0]) / total
    m2 = (weight * old[2] + added * new[2]) / total
    error = math.hypot(weight * old[3], added * new[3]) / total
    return lag, total, m2, error


def fit_drift(model: DriftModel) -> DriftFit:
    """Power law `m2(d) = floor + scale d^exponent` by least squares of log(m2 - floor) on log d, weighted by count.

    The floor is the bin at lag 0 (0 if there is none). The exponent is clipped to [1, 2], from a random walk to aligned
    updates; with fewer than two usable bins it is 1, and without any the scale is 0.
    """
    rows = _filled(model)
    floor = next((m2 for lag, _, m2, _ in rows if lag == 0.0), 0.0)
    usable = [row for row in rows if row[0] > 0.0 and row[2] > floor]
    if not usable:
        return DriftFit(floor=floor, scale=0.0, exponent=1.0, standard_error=0.0)
    weights = [count for _, count, _, _ in usable]
    total = sum(weights)
    xs = [math.log(lag) for lag, _, _, _ in usable]
    ys = [math.log(m2 - floor) for _, _, m2, _ in usable]
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    exponent = 1.0
    if len(usable) >= 2 and spread > 0.0:
        covariance = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
        exponent = min(2.0, max(1.0, covariance / spread))
    intercept = mean_y - exponent * mean_x
    if len(usable) >= 3:
        residuals = sum(w * (y - intercept - exponent * x) ** 2 for w, x, y in zip(weights, xs, ys, strict=True))
        error = math.sqrt(residuals / total * len(usable) / (len(usable) - 2))
    else:
        # Too few bins for a residual: the bins' own relative error.
        error = sum(count * error / m2 for _, count, m2, error in usable) / total
    return DriftFit(floor=floor, scale=math.exp(intercept), exponent=exponent, standard_error=error)


def predict_m2(model: DriftModel, lag: float) -> float:
    """A pessimistic m2 at `lag`, never decreasing in it.

    Inside the data the running maximum of the bins (each plus its standard error), linear in between; outside them the
    power law times `exp(standard_error)`, not above the first bin and not below the last.
    Raises:
        ValueError: negative lag, or a model without any token.
    """
    require(lag >= 0.0, f"lag={lag} must not be negative")
    rows = _filled(model)
    require(bool(rows), "the drift model holds no tokens: update it with a batch first")
    envelope, highest = [], 0.0
    for center, _, m2, error in rows:
        highest = max(highest, m2 + error)
        envelope.append((center, highest))
    (first, lowest), (last, _) = envelope[0], envelope[-1]
    if first <= lag <= last:
        return _interpolate(envelope, lag)
    fit = fit_drift(model)
    outside = (fit.floor + fit.scale * lag**fit.exponent) * math.exp(fit.standard_error)
    return min(lowest, outside) if lag < first else max(highest, outside)


def oscillation(model: DriftModel, lag: float) -> float:
    """`1 - m2(lag) / max_{d < lag} m2(d)`, in [0, 1]: how far drift has swung back at `lag`.

    Delayed feedback overshoots and returns; above 0.3 the step is too large for the delay even if the ESS looks fine.
    0 without data below `lag`.
    """
    require(lag >= 0.0, f"lag={lag} must not be negative")
    rows = _filled(model)
    earlier = max((m2 for center, _, m2, _ in rows if center < lag), default=0.0)
    if earlier <= 0.0:
        return 0.0
    now = _interpolate([(center, m2) for center, _, m2, _ in rows], lag)
    return max(0.0, 1.0 - now / earlier)


def _filled(model: DriftModel) -> list[tuple[float, float, float, float]]:
    """(lag, count, m2, standard error) of the bins with enough tokens, by lag.

    A lag that no longer occurs is forgotten too: below one token, or a thousandth of all, its bin is left out.
    """
    least = min(max(1.0, _LEAST_SHARE * sum(model.count)), max(model.count, default=0.0))
    return sorted(row for row in _bins(model) if row[1] >= least and row[1] > 0.0)


def _interpolate(points: list[tuple[float, float]], x: float) -> float:
    """Piecewise linear through sorted points, constant outside them."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left) if right > left else high
    return points[-1][1]


_LR_FLOOR = 0.1  # of `lr_scale`; the circuit breaker counts the steps spent there
_LARGEST_LAG = 2**20  # answer of `spread_budget` when no finite spread costs anything


def lag_for_ess(fit: DriftFit, *, ess_target: float = 0.5, num_effective_tokens: float) -> float:
    """The largest lag whose predicted ESS reaches the target: `((log(1/target)/n_eff - floor)/scale)^(1/exponent)`.

    0 if the floor alone spends the budget, inf if nothing drifts. Target 0.5 for the clipped sequence ESS, 0.9 for
    tokens.
    """
    require(0.0 < ess_target <= 1.0, f"ess_target={ess_target} must lie in (0, 1]")
    require(num_effective_tokens > 0.0, f"num_effective_tokens={num_effective_tokens} must be positive")
    budget = math.log(1.0 / ess_target) / num_effective_tokens - fit.floor
    if budget <= 0.0:
        return 0.0
    return (budget / fit.scale) ** (1.0 / fit.exponent) if fit.scale > 0.0 else math.inf


def step_lag_bound(bound: LagBound, target: float, *, low: int = 1, high: int) -> LagBound:
    """The lag bound one step closer to `target`, slowly enough not to chase its own delay.

    `smoothed = clip((1 - b) smoothed + b target, low, high)` with `b = 1/(2 value)`: the effect of a bound shows
    `value` steps later, so the memory must be longer than that. `value` moves by 1 when `smoothed` is a full unit away.
    """
    require(1 <= low <= high, f"low={low} and high={high} must satisfy 1 <= low <= high")
    rate = 1.0 / (2.0 * max(bound.value, 1))
    smoothed = min(float(high), max(float(low), (1.0 - rate) * bound.smoothed + rate * target))
    value = bound.value
    if abs(smoothed - value) >= 1.0:
        value += 1 if smoothed > value else -1
    return LagBound(smoothed=smoothed, value=min(high, max(low, value)))


def lr_scale(ess: float, *, rule: str = "sqrt", floor: float = _LR_FLOOR) -> float:
    """Factor on the learning rate in [floor, 1]: `sqrt(min(1, ess))`, or linear, or 1 for rule "none".

    "sqrt" is for Adam-type optimizers, "linear" for SGD (VCPO, arXiv:2602.17616).
    """
    require(rule in ("sqrt", "linear", "none"), f"rule={rule!r} must be one of sqrt, linear, none")
    require(0.0 <= floor <= 1.0, f"floor={floor} must lie in [0, 1]")
    share = min(1.0, ess)
    return max(floor, {"sqrt": math.sqrt(max(share, 0.0)), "linear": share, "none": 1.0}[rule])


@torch.no_grad()
def clip_from_budget(
    log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, budget: float = 0.04, floor_low: float = 0.2,
    floor_high: float = 0.28,
) -> ClipBounds:
    """The widest clip whose harmful tokens keep a clipped second moment within `budget`.

    `log_cap` is the largest tau with `mean_H min(ell^2, tau^2) <= budget` over harmful tokens (inf if the mean is
    within), `eps_low = max(1 - exp(-tau), floor_low)`, `eps_high = max(exp(tau) - 1, floor_high)`. Reads numbers back
    from the device: call once per batch.
    Source: M2PO, arXiv:2510.01161, with the authors' harmful-only rule.
    """
    require(budget >= 0.0, f"budget={budget} must not be negative")
    require(
        0.0 <= floor_low <= 1.0 and floor_high >= 0.0,
        f"floor_low={floor_low} and floor_high={floor_high} must satisfy 0 <= floor_low <= 1, floor_high >= 0",
    )
    log_ratios = read_log_ratios(mask, log_ratios)
    (advantages,) = read(mask, advantages=advantages)
    squares = log_ratios[_harmful(log_ratios, advantages)].double().square().sort().values
    log_cap = _second_moment_cap(squares, budget)
    widest = math.inf if log_cap > 700.0 else math.expm1(log_cap)
    return ClipBounds(eps_low=max(-math.expm1(-log_cap), floor_low), eps_high=max(widest, floor_high), log_cap=log_cap)


def _harmful(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    """Tokens that the update would push further away: A > 0 and u > 1, or A < 0 and u < 1; never a masked one."""
    return ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))


def _second_moment_cap(squares: Tensor, budget: float) -> float:
    """Largest tau with `mean(min(squares, tau^2)) <= budget`; `squares` ascending."""
    count = squares.numel()
    if count == 0 or float(squares.mean()) <= budget:
        return math.inf
    left = torch.arange(count, 0, -1, dtype=torch.float64, device=squares.device)  # tokens from here to the largest
    below = squares.cumsum(0) - squares
    # The clipped mean if tau^2 were the i-th square; it grows with i, so the last one within budget brackets tau.
    within = int(((below + left * squares) / count <= budget).sum())
    spent = float(squares[:within].sum())
    return math.sqrt(max(0.0, count * budget - spent) / (count - within))


@torch.no_grad()
def zscore_keep(
    log_ratios: Tensor, advantages: Tensor, lag_m2: Tensor, mask: Tensor, *, z_bound: float = 2.5,
    log_bound: float = 1.6094379,
) -> Tensor:
    """Trust region by lag: drop harmful tokens unusual *for their lag*; bool [B, T]. Experimental.

    `lag_m2` [B, T] is m2 at each token's lag; dropped if `abs(ell) > z_bound sqrt(lag_m2)` or `abs(ell) > log_bound`
    (log 5).
    """
    require(z_bound > 0.0 and log_bound > 0.0, f"z_bound={z_bound} and log_bound={log_bound} must be positive")
    log_ratios = read_log_ratios(mask, log_ratios)
    advantages, lag_m2 = read(mask, advantages=advantages, lag_m2=lag_m2)
    far = (log_ratios.abs() > z_bound * lag_m2.clamp(min=0.0).sqrt()) | (log_ratios.abs() > log_bound)
    return mask & ~(_harmful(log_ratios, advantages) & far)


@torch.no_grad()
def rho_bar_for_ess(
    log_ratios: Tensor, mask: Tensor, *, ess_target: float = 0.5, low: float = 1.0, high: float = 10.0
) -> float:
    """The largest truncation C in [low, high] whose clipped-sequence ESS reaches the target, `low` if none does.

    The ESS of `min(exp(S), C)` never increases with C, so bisection finds it. Keep c_bar at 1 whatever comes out.
    """
    require(0.0 < low <= high, f"low={low} and high={high} must satisfy 0 < low <= high")
    require(0.0 < ess_target <= 1.0, f"ess_target={ess_target} must lie in (0, 1]")
    sums = read_log_ratios(mask, log_ratios).double().sum(1)[mask.any(1)]
    weights = sums.clamp(-LOG_BOUND, LOG_BOUND).exp()

    def enough(cap: float) -> bool:
        clipped = weights.clamp(max=cap)
        return bool(clipped.sum().square() >= ess_target * clipped.numel() * clipped.square().sum())

    if enough(high):
        return high
    if not enough(low):
        return low
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def spread_budget(model: DriftModel, *, m2_target: float, fraction: float = 0.25) -> int:
    """Largest group spread D with predicted `m2(D) <= fraction * m2_target`; 0 if even 0 costs more.

    Groups beyond it are split, because one standard deviation over mixed policies means nothing.
    """
    require(m2_target > 0.0 and fraction > 0.0, f"m2_target={m2_target} and fraction={fraction} must be positive")
    allowed = fraction * m2_target
    if predict_m2(model, 0) > allowed:
        return 0
    low, high = 0, 1
    while predict_m2(model, high) <= allowed:
        if high >= _LARGEST_LAG:
            return _LARGEST_LAG
        low, high = high, 2 * high
    while high - low > 1:  # predict_m2 never decreases with lag
        middle = (low + high) // 2
        low, high = (middle, high) if predict_m2(model, middle) <= allowed else (low, middle)
    return low


def should_publish(m2_since_publish: float, *, m2_target: float, fraction: float = 0.25) -> bool:
    """Whether the policy has moved enough since the last publish: `m2_since_publish > fraction * m2_target`."""
    require(m2_target > 0.0, f"m2_target={m2_target} must be positive")
    require(fraction >= 0.0, f"fraction={fraction} must not be negative")
    return m2_since_publish > fraction * m2_target


def goodput(groups_per_s: float, ess: float) -> float:
    """Effective groups per second, `groups_per_s * ess`: what a lag bound should maximize."""
    return groups_per_s * ess


def step_goodput(state: GoodputState, value: float, *, num_steps: int = 20, t_bound: float = 2.0) -> GoodputState:
    """One step of a hill-climb on eta; `value` is the goodput measured at `state.eta` in this step.

    The accepted eta is measured for `num_steps`, then a neighbor for as many. If the neighbor is better by Welch's
    t > `t_bound` it becomes the accepted one and the climb goes on; otherwise eta returns, the direction turns and the
    accepted eta is measured again, because goodput drifts during training. eta stays >= 0.
    """
    require(num_steps >= 2, f"num_steps={num_steps} must be at least 2")
    if len(state.baseline) < num_steps:
        baseline = (*state.baseline, value)
        if len(baseline) < num_steps:
            return GoodputState(eta=state.eta, direction=state.direction, baseline=baseline)
        return _trial(state.eta, state.direction, baseline)
    current = (*state.current, value)
    if len(current) < num_steps:
        return GoodputState(eta=state.eta, direction=state.direction, baseline=state.baseline, current=current)
    if _welch_t(current, state.baseline) > t_bound:
        return _trial(state.eta, state.direction, current)
    return GoodputState(eta=state.eta - state.direction, direction=-state.direction)


def _trial(eta: int, direction: int, baseline: tuple[float, ...]) -> GoodputState:
    heading = direction if eta + direction >= 0 else -direction
    return GoodputState(eta=eta + heading, direction=heading, baseline=baseline)


def _welch_t(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Welch's t of `mean(first) - mean(second)`; +-inf for different constants, 0 for equal ones."""

    def mean_and_square_error(values: tuple[float, ...]) -> tuple[float, float]:
        mean = sum(values) / len(values)
        return mean, sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)

    (mean_a, error_a), (mean_b, error_b) = mean_and_square_error(first), mean_and_square_error(second)
    difference, error = mean_a - mean_b, math.sqrt(error_a + error_b)
    if error == 0.0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error


def step_breaker(
    state: BreakerState, *, ess: float, step_scale: float, grad_norm: float, oscillation: float, queue_lag: float
) -> BreakerState:
    """The circuit breaker: "normal", "cautious" (halve eta, lower OPSM delta, freeze dual integrals) or "drain".

    A step is in trouble if ess < 0.3, or the learning-rate scale has been at its floor 5 steps running, or grad_norm is
    above 5 times its running mean, or oscillation > 0.3, or any of them is not a number. Trouble leads to cautious;
    ess < 0.1 with a queue older than 1 step leads to drain, where admission stops. Drain ends in cautious once
    `queue_lag <= 1`: an empty queue brings no healthy steps, so waiting for those would never end. 20 healthy steps
    lead one state back.
    """
    num_floor_steps = state.num_floor_steps + 1 if step_scale <= _LR_FLOOR * (1 + 1e-9) else 0
    usual = state.grad_norm_ewma
    # Written as "not good" so that NaN counts as trouble.
    calm = ess >= 0.3 and num_floor_steps < 5 and oscillation <= 0.3 and math.isfinite(grad_norm)
    healthy = calm and (usual == 0.0 or grad_norm <= 5.0 * usual)
    num_healthy_steps = state.num_healthy_steps + 1 if healthy else 0
    mode = state.mode
    if not ess >= 0.1 and queue_lag > 1:
        mode = "drain"
    elif mode == "drain" and queue_lag <= 1:
        mode = "cautious"
    elif not healthy and mode == "normal":
        mode = "cautious"
    elif num_healthy_steps >= 20 and mode != "normal":
        mode = "cautious" if mode == "drain" else "normal"
    return BreakerState(
        mode=mode,
        num_floor_steps=num_floor_steps,
        num_healthy_steps=num_healthy_steps if mode == state.mode else 0,
        grad_norm_ewma=_running_norm(usual, grad_norm),
    )


def _running_norm(usual: float, grad_norm: float, decay: float = 0.95) -> float:
    """EWMA of the gradient norm; a spike enters at no more than 5 times the mean, so it cannot hide the next one."""
    if not math.isfinite(grad_norm):
        return usual
    return grad_norm if usual == 0.0 else decay * usual + (1.0 - decay) * min(grad_norm, 5.0 * usual)
