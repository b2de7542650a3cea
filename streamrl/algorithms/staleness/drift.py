"""Drift of the policy as a function of lag, measured on every batch.

A batch holds tokens of many lags; the second moment of their log-ratios, `m2(d) = E[ell^2 | lag d]`, is kept per lag
bin and forgotten exponentially. It predicts the cost of a larger lag before it is allowed. States are Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from streamrl.algorithms.checks import require
from streamrl.algorithms.types import DriftBins, DriftFit, DriftModel

__all__ = ["fit_drift", "oscillation", "predict_m2", "update_drift"]

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
