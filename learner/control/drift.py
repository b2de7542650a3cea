"""Drift by lag, measured on every batch, and how drift becomes a loss of effective samples.

The numbers come from the step's global totals, so all ranks hold the same tracker. See `algorithms.staleness.drift`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.algorithms import fit_drift, lag_for_ess, oscillation, predict_m2, spread_budget, update_drift
from streamrl.algorithms.types import DriftBins, DriftFit, DriftModel

EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 4096)
"""Bin k holds lags from EDGES[k] to EDGES[k + 1] - 1."""
LEAST_ESS = 0.05
"""Below this an ESS no longer tells how far it has collapsed: it enters the calibration as this."""


@dataclass(frozen=True, slots=True)
class DriftTracker:
    """Drift by lag and the calibration of `ESS = exp(-n_eff m2)`, both forgotten over `half_life` steps.

    Attributes:
        model: None before the first batch.
        products, squares: discounted sums of `m2 * log(1 / ESS)` and `m2^2`; their quotient is n_eff.
    """

    half_life: float
    model: DriftModel | None = None
    products: float = 0.0
    squares: float = 0.0

    def observed(self, m2_by_lag: Mapping[int, tuple[float, float]], ess: float | None) -> DriftTracker:
        """The tracker after one more batch: lag -> (sum of squared log-ratios, tokens), and its ESS, if it has one."""
        bins = to_bins(m2_by_lag)
        count = sum(bins.count)
        if not count:
            return self
        model = update_drift(self.model, bins, half_life=self.half_life)
        products, squares = self.products, self.squares
        if ess is not None:
            m2 = sum(m2 * n for m2, n in zip(bins.m2, bins.count, strict=True)) / count
            keep = 0.5 ** (1.0 / self.half_life)
            loss = -math.log(min(1.0, max(LEAST_ESS, ess)))
            products, squares = keep * products + m2 * loss, keep * squares + m2 * m2
        return DriftTracker(self.half_life, model, products, squares)

    @property
    def fit(self) -> DriftFit:
        """The power law of drift over lag; flat without data."""
        return fit_drift(self.model) if self.model is not None else DriftFit(0.0, 0.0, 1.0, 0.0)

    @property
    def num_effective_tokens(self) -> float:
        """n_eff: tokens of a trajectory that lose samples as if they were independent; 0 while nothing drifts."""
        return self.products / self.squares if self.squares > 0.0 else 0.0

    def m2_at(self, lag: float) -> float:
        """Predicted mean squared log-ratio at `lag`, never falling with it; 0 without data."""
        return predict_m2(self.model, lag) if self.model is not None else 0.0

    def m2_table(self, largest_lag: int) -> tuple[float, ...]:
        """`m2_at` of lag 0 to `largest_lag`; empty without data."""
        return tuple(self.m2_at(lag) for lag in range(largest_lag + 1)) if self.model is not None else ()

    def drift_over(self, num_steps: int) -> float:
        """Predicted drift that `num_steps` optimizer steps add to what the engines disagree by anyway."""
        return max(0.0, self.m2_at(num_steps) - self.m2_at(0))

    def oscillation_at(self, lag: float) -> float:
        return oscillation(self.model, lag) if self.model is not None else 0.0

    def lag_for(self, ess_target: float) -> float:
        """The largest lag whose predicted ESS is the target; inf while nothing drifts."""
        tokens = self.num_effective_tokens
        return lag_for_ess(self.fit, ess_target=ess_target, num_effective_tokens=tokens) if tokens > 0.0 else math.inf

    def spread_for(self, m2_target: float) -> int | None:
        """The largest difference of lags inside a group that the budget allows; None without data."""
        return spread_budget(self.model, m2_target=m2_target) if self.model is not None else None


def to_bins(m2_by_lag: Mapping[int, tuple[float, float]]) -> DriftBins:
    """Sums by lag as bins of lag. The standard error is a Gaussian's: `m2 sqrt(2 / count)`."""
    num_bins = len(EDGES) - 1
    lags, counts, squares = ([0.0] * num_bins for _ in range(3))
    for lag, (total, count) in m2_by_lag.items():
        which = bisect_right(EDGES, lag) - 1
        if count > 0 and 0 <= which < num_bins:
            lags[which] += lag * count
            counts[which] += count
            squares[which] += total
    sizes = [max(count, 1.0) for count in counts]
    m2 = [square / size for square, size in zip(squares, sizes, strict=True)]
    return DriftBins(
        lag=tuple(lags[k] / sizes[k] if counts[k] else float(EDGES[k]) for k in range(num_bins)),
        count=tuple(counts), m2=tuple(m2),
        standard_error=tuple(m2[k] * math.sqrt(2.0 / sizes[k]) for k in range(num_bins)),
    )
