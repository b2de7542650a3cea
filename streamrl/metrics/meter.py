"""The numbers of one step as sums and counts, so that micro-batches and ranks of any size add up exactly.

    micro-batches --add--> Meter (each rank) --totals--> merge (every rank) --flush--> one dict per step

The mean of two means is wrong as soon as their counts differ; nothing here divides before `flush`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.metrics.names import Reduction, lookup

PERCENTILES = {"lag/token": (("lag/token_p50", 0.5), ("lag/token_p99", 0.99))}
"""Histogram -> the keys derived from it when the step ends."""

_BINNED = (Reduction.histogram, Reduction.mean_by_bin)
_DECODER = msgspec.msgpack.Decoder(dict[str, dict[int, list[float]]])


class Meter:
    """The open step of one rank.

    Example:
        meter = Meter()
        meter.add("policy/loss", 0.5, weight=10)    # a mean of 10 tokens
        meter.add("policy/loss", 2.0, weight=30)
        meter.flush(1)                              # {"step": 1, "policy/loss": 1.625}
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[int, list[float]]] = {}  # key -> bin -> fields; bin 0 of a metric without bins

    def add(self, key: str, value: float, weight: float = 1.0) -> None:
        """Add one value.

        Args:
            key: a name of `streamrl.metrics.names`.
            value: in the metric's unit. For a histogram, the bin.
            weight: how many units (tokens, trajectories) `value` is the mean of; for a histogram, the count. Ignored by
                max and last. A weight of 0 adds nothing.
        Raises:
            KeyError: the key is not in the list.
            ValueError: the weight is negative or not finite, a bin is not an integer, or the metric needs another call.
        """
        reduction = lookup(key).reduction
        if reduction in (Reduction.percentile, Reduction.mean_by_bin):
            raise ValueError(f"{key} is a {reduction.value} metric: add() cannot feed it.")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"{key}: weight {weight} must be finite and not negative.")
        if weight == 0:
            return
        if not math.isfinite(value):
            self._combine("meter/num_nonfinite", Reduction.sum, 0, [1.0])
        elif reduction is Reduction.histogram:
            self._combine(key, reduction, value, [float(weight)])
        else:
            self._combine(key, reduction, 0, _fields(reduction, float(value), float(weight)))

    def add_all(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """`add` each item with the same weight."""
        for key, value in values.items():
            self.add(key, value, weight)

    def add_moments(self, key: str, count: float, total: float, squares: float) -> None:
        """Add the sums of `count` observations to a std or ess metric: sum of x and sum of x^2."""
        reduction = lookup(key).reduction
        if reduction not in (Reduction.std, Reduction.ess):
            raise ValueError(f"{key} is a {reduction.value} metric: it takes no moments.")
        if not (math.isfinite(total) and math.isfinite(squares)):
            self._combine("meter/num_nonfinite", Reduction.sum, 0, [1.0])
        elif count > 0:
            self._combine(key, reduction, 0, [float(count), float(total), float(squares)])

    def add_histogram(self, key: str, counts: Mapping[int, float]) -> None:
        """Add ready counts per bin."""
        for which, count in counts.items():
            self.add(key, which, count)

    def add_at(self, key: str, which: int, value: float, weight: float = 1.0) -> None:
        """Add to one bin of a mean-by-bin metric."""
        if lookup(key).reduction is not Reduction.mean_by_bin:
            raise ValueError(f"{key} is a {lookup(key).reduction.value} metric: it has no means by bin.")
        if not math.isfinite(value):
            self._combine("meter/num_nonfinite", Reduction.sum, 0, [1.0])
        elif weight > 0:
            self._combine(key, Reduction.mean_by_bin, which, [float(value) * weight, float(weight)])

    def totals(self) -> bytes:
        """Everything added so far, for other ranks."""
        return msgspec.msgpack.encode(self._held)

    def merge(self, totals: bytes) -> None:
        """Add another rank's `totals()` to this meter."""
        for key, bins in _DECODER.decode(totals).items():
            reduction = lookup(key).reduction
            if reduction is Reduction.last and key in self._held:
                continue
            for which, fields in bins.items():
                self._combine(key, reduction, which, fields)

    def value(self, key: str) -> float | None:
        """The scalar that `flush` would give this key if the step ended now; None if it got no value."""
        held, reduction = self._held.get(key), lookup(key).reduction
        return None if held is None or reduction in _BINNED else _result(reduction, held[0])

    def bins(self, key: str) -> dict[int, tuple[float, float]]:
        """Bin -> (sum, count) of a mean-by-bin metric as it stands now."""
        return {which: (fields[0], fields[1]) for which, fields in sorted(self._held.get(key, {}).items())}

    def flush(self, step: int) -> dict[str, Any]:
        """End the step: divide, derive percentiles, forget. A key that got no value this step is absent."""
        row: dict[str, Any] = {"step": int(step)}
        for key, bins in self._held.items():
            reduction = lookup(key).reduction
            if reduction is Reduction.histogram:
                row[key] = {which: int(round(bins[which][0])) for which in sorted(bins)}
                row.update((name, percentile(row[key], share)) for name, share in PERCENTILES.get(key, ()))
            elif reduction is Reduction.mean_by_bin:
                row[key] = {which: bins[which][0] / bins[which][1] for which in sorted(bins)}
            else:
                row[key] = _result(reduction, bins[0])
        self._held.clear()
        return row

    def _combine(self, key: str, reduction: Reduction, which: float, fields: list[float]) -> None:
        if which != int(which):
            raise ValueError(f"{key}: bin {which} is not an integer.")
        bins = self._held.setdefault(key, {})
        held = bins.get(int(which))
        if held is None or reduction is Reduction.last:
            bins[int(which)] = fields
        elif reduction is Reduction.max:
            held[0] = max(held[0], fields[0])
        else:
            bins[int(which)] = [a + b for a, b in zip(held, fields, strict=True)]


def percentile(counts: Mapping[int, float], share: float) -> int:
    """The smallest bin at or below which at least `share` of the counts lie."""
    total = sum(counts.values())
    seen = 0.0
    for which in sorted(counts):
        seen += counts[which]
        if seen >= share * total:
            return which
    raise ValueError(f"No percentile of an empty histogram: {dict(counts)}")


def _fields(reduction: Reduction, value: float, weight: float) -> list[float]:
    if reduction is Reduction.mean:
        return [value * weight, weight]
    if reduction in (Reduction.std, Reduction.ess):
        return [weight, value * weight, value * value * weight]
    return [value]


def _result(reduction: Reduction, fields: list[float]) -> float:
    if reduction is Reduction.mean:
        return fields[0] / fields[1]
    if reduction is Reduction.std:
        count, total, squares = fields
        return math.sqrt(max(0.0, squares / count - (total / count) ** 2))
    if reduction is Reduction.ess:
        count, total, squares = fields
        return total * total / (count * squares) if squares > 0 else 1.0
    return fields[0]
