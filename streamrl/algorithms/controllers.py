"""Controllers of the KL coefficient, the entropy coefficient and the upper clip.

A controller takes the state and this step's measured value (a detached global mean) and returns the next state; the
coefficient is then clamped to [low, high]. Start at `KlState(0.2)`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from streamrl.algorithms.checks import float_dtype, require
from streamrl.algorithms.types import ConstraintState, KlState

__all__ = [
    "clip_high_update", "constraint_penalty", "entropy_coef_update", "kl_doubling", "kl_exponential", "kl_horizon",
    "kl_linear", "kl_log_integral", "kl_pid", "kl_schedule", "lagrangian_update", "pid_lagrangian_update",
]


def kl_exponential(
    state: KlState, kl: float, *, target: float = 0.01, up: float = 1.03, down: float = 0.99, low: float = 1e-3,
    high: float = 10.0,
) -> KlState:
    """`b *= up` if kl > target, else `b *= down`."""
    _check(target, low, high)
    return _with_coef(state, state.coef * (up if kl > target else down), low, high)


def kl_linear(
    state: KlState, kl: float, *, target: float = 0.01, factor: float = 0.5, low: float = 1e-3, high: float = 10.0
) -> KlState:
    """`b *= 1 + factor (kl/target - 1)`."""
    _check(target, low, high)
    return _with_coef(state, state.coef * (1.0 + factor * (kl / target - 1.0)), low, high)


def kl_pid(
    state: KlState, kl: float, *, target: float = 0.01, kp: float = 0.1, ki: float = 0.01, kd: float = 0.001,
    integral_bound: float = 1.0, low: float = 1e-3, high: float = 10.0,
) -> KlState:
    """`e = kl - target; I = clamp(I + e, +-integral_bound); b = max(0, b + kp e + ki I + kd (e - e_prev))`.

    The bound on the integral is the anti-windup: a long excursion cannot outlive itself.
    """
    _check(target, low, high)
    require(integral_bound >= 0.0, f"integral_bound={integral_bound} must not be negative")
    error = kl - target
    integral = _clip(state.integral + error, -integral_bound, integral_bound)
    coef = max(0.0, state.coef + kp * error + ki * integral + kd * (error - state.previous_error))
    return KlState(coef=_clip(coef, low, high), integral=integral, previous_error=error)


def kl_horizon(
    state: KlState, kl: float, *, target: float = 0.01, num_trajectories: float, horizon: float, clip: float = 0.2,
    low: float = 1e-3, high: float = 10.0,
) -> KlState:
    """`b *= 1 + clip(kl/target - 1, +-clip) num_trajectories / horizon`. Ziegler et al. 2019, arXiv:1909.08593, 2.2."""
    _check(target, low, high)
    require(horizon > 0.0, f"horizon={horizon} must be positive")
    error = _clip(kl / target - 1.0, -clip, clip)
    return _with_coef(state, state.coef * (1.0 + error * num_trajectories / horizon), low, high)


def kl_doubling(state: KlState, kl: float, *, target: float = 0.01, low: float = 1e-3, high: float = 10.0) -> KlState:
    """`b *= 2` if kl > 1.5 target, `b /= 2` if kl < target / 1.5; unchanged at and between the bounds.

    Source: the adaptive KL penalty of PPO, arXiv:1707.06347, section 4.
    """
    _check(target, low, high)
    if kl > 1.5 * target:
        return _with_coef(state, 2.0 * state.coef, low, high)
    return _with_coef(state, state.coef / 2.0 if kl < target / 1.5 else state.coef, low, high)


def kl_log_integral(
    state: KlState, kl: float, *, target: float = 0.01, gain: float = 0.1, low: float = 1e-3, high: float = 10.0
) -> KlState:
    """`b *= exp(gain (kl/target - 1))`: an integral controller of log b, free of scale; recommended."""
    _check(target, low, high)
    # A runaway KL must not overflow exp; beyond this the coefficient is at its bound anyway.
    exponent = min(gain * (kl / target - 1.0), 100.0)
    return _with_coef(state, state.coef * math.exp(exponent), low, high)


def kl_schedule(
    step: int, *, kind: str = "cosine", start: float = 0.2, num_steps: int = 1000, low: float = 1e-3, high: float = 10.0
) -> float:
    """The coefficient at `step` without feedback, p = min(step / num_steps, 1), then clamped.

    "cosine" `b0 (1 + cos(pi p)) / 2`; "linear" `b0 (1 - p)`; "exponential" `b0 exp(-3 p)`; "warmup_cosine" `b0 p / 0.1`
    for p < 0.1, then the cosine of `(p - 0.1) / 0.9`.
    """
    kinds = ("cosine", "linear", "exponential", "warmup_cosine")
    require(kind in kinds, f"kind={kind!r} must be one of {', '.join(kinds)}")
    require(num_steps >= 1 and step >= 0, f"num_steps={num_steps} must be at least 1 and step={step} not negative")
    require(low <= high, f"low={low} and high={high} must satisfy low <= high")
    progress = min(step / num_steps, 1.0)
    if kind == "warmup_cosine" and progress < 0.1:
        return _clip(start * progress / 0.1, low, high)
    if kind == "linear":
        return _clip(start * (1.0 - progress), low, high)
    if kind == "exponential":
        return _clip(start * math.exp(-3.0 * progress), low, high)
    phase = (progress - 0.1) / 0.9 if kind == "warmup_cosine" else progress
    return _clip(start * (1.0 + math.cos(math.pi * phase)) / 2.0, low, high)


def entropy_coef_update(
    coef: float, entropy: float, *, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> float:
    """`coef + step` if entropy < target, else `coef - step`, clipped; apply the bonus only while entropy <= target.

    Source: Skywork-OR1, arXiv:2505.22312.
    """
    require(low <= high, f"low={low} and high={high} must satisfy low <= high")
    return _clip(coef + (step if entropy < target else -step), low, high)


def clip_high_update(
    eps_high: float, entropy: float, *, target: float, step: float = 0.005, low: float = 0.2, high: float = 0.5
) -> float:
    """`eps_high + step sign(target - entropy)`, clipped: room for rare tokens while entropy is low."""
    require(low <= high, f"low={low} and high={high} must satisfy low <= high")
    return _clip(eps_high + step * ((target > entropy) - (target < entropy)), low, high)


def _check(target: float, low: float, high: float) -> None:
    require(target > 0.0, f"target={target} must be positive")
    require(0.0 <= low <= high, f"low={low} and high={high} must satisfy 0 <= low <= high")


def _with_coef(state: KlState, coef: float, low: float, high: float) -> KlState:
    return replace(state, coef=_clip(coef, low, high))


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))


def lagrangian_update(
    state: ConstraintState, value: float, limit: float, *, sense: str = "max", lr: float = 0.01, high: float = math.inf,
    frozen: bool = False,
) -> ConstraintState:
    """Dual ascent: `multiplier = clip(multiplier + lr e, 0, high)`.

    `frozen` leaves the multiplier as it is: stale cost estimates (a low ESS) would make it oscillate.
    """
    error = float(signed_violation(value, limit, sense))
    require(high >= 0.0, f"high={high} must not be negative")
    multiplier = state.multiplier if frozen else min(high, max(0.0, state.multiplier + lr * error))
    return ConstraintState(multiplier=multiplier, integral=state.integral, previous_error=error)


def pid_lagrangian_update(
    state: ConstraintState, value: float, limit: float, *, sense: str = "max", kp: float = 0.1, ki: float = 0.01,
    kd: float = 0.001, high: float = math.inf, frozen: bool = False,
) -> ConstraintState:
    """`I = max(0, I + e); multiplier = clip(kp e + ki I + kd max(0, e - e_prev), 0, high)`.

    `frozen` keeps the integral and the multiplier. The integral stops at the value where it alone reaches `high`, so a
    capped multiplier comes down at once. Source: Stooke et al. 2020, arXiv:2007.03964, algorithm 2.
    """
    error = float(signed_violation(value, limit, sense))
    require(high >= 0.0, f"high={high} must not be negative")
    if frozen:
        return ConstraintState(multiplier=state.multiplier, integral=state.integral, previous_error=error)
    integral = max(0.0, state.integral + error)
    if ki > 0.0:
        integral = min(integral, high / ki)
    raw = kp * error + ki * integral + kd * max(0.0, error - state.previous_error)
    return ConstraintState(multiplier=min(high, max(0.0, raw)), integral=integral, previous_error=error)


def constraint_penalty(value: Tensor | float, limit: float, *, sense: str = "max", weight: float = 10.0) -> Tensor:
    """`weight * relu(e)^2`, 0-d, differentiable in `value` (a batch mean of KL, entropy, cost)."""
    require(weight >= 0.0, f"weight={weight} must not be negative")
    return weight * signed_violation(read_mean(value), limit, sense).clamp(min=0.0).square()


def signed_violation(value: Tensor | float, limit: float, sense: str) -> Tensor | float:
    """How far `value` is beyond `limit`; negative while it keeps the limit. `sense`: "max" or "min"."""
    require(sense in ("max", "min"), f"sense={sense!r} must be one of max, min")
    return value - limit if sense == "max" else limit - value


def read_mean(value: Tensor | float) -> Tensor:
    """The 0-d tensor of a batch mean, in the dtype of the algorithms. Raises on another shape."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    require(tensor.dim() == 0, f"value has shape {list(tensor.shape)}, expected a 0-d mean")
    return tensor.to(float_dtype(tensor))
