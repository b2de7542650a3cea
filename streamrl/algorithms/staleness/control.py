"""Controllers of the lag bound, the step size and the clip, from measured staleness.

They are pure: those with a state take it with one measurement (a detached global mean) and return the next state; a
caller steps them once per optimizer step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import LOG_BOUND, read, read_log_ratios, require
from streamrl.algorithms.staleness.drift import predict_m2
from streamrl.algorithms.types import BreakerState, ClipBounds, DriftFit, DriftModel, GoodputState, LagBound

__all__ = [
    "clip_from_budget", "goodput", "lag_for_ess", "lr_scale", "rho_bar_for_ess", "should_publish", "spread_budget",
    "step_breaker", "step_goodput", "step_lag_bound", "zscore_keep",
]

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
