"""Results, states and specifications of `streamrl.algorithms`.

Everything is frozen: a controller takes a state and returns a new one. Shapes: B rows (trajectories), T token
positions. Types without a tensor hold Python numbers only, so they go into a checkpoint as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = [
    "BreakerState", "ClipBounds", "ConstraintState", "Correction", "CorrectionSpec", "DriftBins", "DriftFit",
    "DriftModel", "GoodputState", "KlState", "LagBound", "LagSummary", "Moments", "Returns",
    "SegmentReturns", "SequenceStats", "TokenLoss",
]

# Tensor-holding types compare by identity (eq=False): comparing tensors with == has no single truth value.


@dataclass(frozen=True, eq=False, slots=True)
class Returns:
    """Result of an estimator, detached: what the policy and what the critic should learn."""

    advantages: Tensor  # [B, T] reward units; without the token's own importance ratio unless the estimator says so
    targets: Tensor  # [B, T] reward units; what the critic regresses to


@dataclass(frozen=True, eq=False, slots=True)
class SegmentReturns:
    """`Returns` on segments: every token has its segment's advantage, targets are non-zero only at `starts`."""

    advantages: Tensor  # [B, T]
    targets: Tensor  # [B, T]
    starts: Tensor  # bool [B, T], first action token of each segment: the only places where the critic is trained


@dataclass(frozen=True, eq=False, slots=True)
class TokenLoss:
    """Result of a surrogate: a loss per token, to be minimized, and where the trust region acted."""

    losses: Tensor  # [B, T], differentiable in the policy log-probs only
    clipped: Tensor  # bool [B, T], the gradient of this token was removed or bounded


@dataclass(frozen=True, eq=False, slots=True)
class SequenceStats:
    """Row statistics of log-ratios ell over action tokens; all zero for a row without any."""

    num_tokens: Tensor  # int64 [B]
    log_sum: Tensor  # [B] S = sum ell (each ell clamped, the sum not)
    log_mean: Tensor  # [B] g = S / n
    k2_sum: Tensor  # [B] sum ell^2 / 2
    k2_max: Tensor  # [B] max ell^2 / 2
    k3_mean: Tensor  # [B] mean(exp(ell) - ell - 1)


@dataclass(frozen=True, eq=False, slots=True)
class Correction:
    """Detached weights and mask of an actor-learner correction."""

    weights: Tensor  # [B, T], multiplies the token loss
    keep: Tensor  # bool [B, T], goes to `aggregate(keep=...)`


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """One row of the correction table: which log-ratio, which weight, which rejection."""

    mode: str | None = None  # "decoupled": log-ratios are prox/mu; "bypass": pi/mu; None: no correction
    surrogate: str | None = None  # the only surrogate that it fits, None = any
    weight: str = "none"  # "none", "token", "sequence"
    cap: float = 2.0  # truncation of the weight
    reject: str = "none"  # "none", "sequence", "geometric", "k3"
    low: float = 0.0
    high: float = float("inf")  # for "k3" the only bound
    normalize: bool = False  # divide by the mean weight after truncation
    function: Callable[..., Correction] | None = None  # (log_ratios, mask) -> Correction, instead of weight and reject


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """Clip range of a PPO-type surrogate, derived from a second-moment budget."""

    eps_low: float
    eps_high: float
    log_cap: float  # the cap on abs(ell) of harmful tokens; inf if the budget already holds


@dataclass(frozen=True, eq=False, slots=True)
class Moments:
    """Count, sum and sum of squares as 0-d float64 tensors; add them over ranks and micro-batches before use."""

    count: Tensor
    total: Tensor
    total_squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.total_squares + other.total_squares)


@dataclass(frozen=True, eq=False, slots=True)
class LagSummary:
    """Lags of each trajectory in optimizer steps; all zero for a row without action tokens."""

    head: Tensor  # int64 [B] lag of the oldest token
    tail: Tensor  # int64 [B] lag of the newest token; negative means a version from the future


@dataclass(frozen=True, slots=True)
class LagBound:
    """State of the adaptive lag bound."""

    smoothed: float
    value: int


@dataclass(frozen=True, slots=True)
class DriftBins:
    """Second moment of log-ratios by lag, of one batch. Empty bins have count 0."""

    lag: tuple[float, ...]  # mean lag of the tokens in the bin
    count: tuple[float, ...]
    m2: tuple[float, ...]  # mean ell^2
    standard_error: tuple[float, ...]  # of m2, as if tokens were independent


@dataclass(frozen=True, slots=True)
class DriftModel(DriftBins):
    """`DriftBins`, exponentially forgotten over optimizer steps."""


@dataclass(frozen=True, slots=True)
class DriftFit:
    """Power law `m2(d) = floor + scale * d ** exponent`."""

    floor: float  # m2 at lag 0: the mismatch between the engines
    scale: float
    exponent: float  # in [1, 2]
    standard_error: float  # of log m2


@dataclass(frozen=True, slots=True)
class KlState:
    """State of a KL coefficient controller."""

    coef: float
    integral: float = 0.0
    previous_error: float = 0.0


@dataclass(frozen=True, slots=True)
class ConstraintState:
    """State of a Lagrange multiplier."""

    multiplier: float = 0.0
    integral: float = 0.0
    previous_error: float = 0.0


@dataclass(frozen=True, slots=True)
class GoodputState:
    """State of the goodput hill-climber: samples at the accepted eta and at the one on trial."""

    eta: int
    direction: int = 1
    baseline: tuple[float, ...] = ()
    current: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class BreakerState:
    """State of the circuit breaker; `mode` is "normal", "cautious" or "drain"."""

    mode: str = "normal"
    num_floor_steps: int = 0
    num_healthy_steps: int = 0
    grad_norm_ewma: float = 0.0
