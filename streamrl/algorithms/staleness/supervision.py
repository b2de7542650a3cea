"""Slow loops around training: a hill-climb on goodput, and the circuit breaker.

Both are pure steps over a frozen state; a caller runs them once per optimizer step.
"""

from __future__ import annotations

import math

from streamrl.algorithms.checks import require
from streamrl.algorithms.types import BreakerState, GoodputState

_LR_FLOOR = 0.1  # of `lr_scale`


def goodput(groups_per_s: float, ess: float) -> float:
    """Effective groups per second, `groups_per_s * ess`: what a lag bound should maximize."""
    return groups_per_s * ess


def step_goodput(state: GoodputState, value: float, *, num_steps: int = 20, t_bound: float = 2.0) -> GoodputState:
    """One step of a hill-climb on eta; `value` is the goodput measured at `state.eta` in this step.

    The accepted eta is measured for `num_steps`, then a neighbor for as many. If the neighbor is better by Welch's
    t > `t_bound` it becomes the accepted one and the climb goes on; otherwise eta returns, the direction turns and the
    accepted eta is measured anew, because goodput drifts during training. eta stays >= 0.
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
