"""Constraints on means (KL at most, entropy at least): penalties and Lagrange multipliers.

The error is `e = value - limit` for sense "max" (value must stay below) and `limit - value` for "min": positive means
violated. Multipliers are updated once per optimizer step from detached global means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import float_dtype, require
from streamrl.algorithms.types import ConstraintState

__all__ = ["constraint_penalty", "lagrangian_update", "pid_lagrangian_update"]


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
