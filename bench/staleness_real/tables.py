"""The table of the experiment as Markdown. Pure: lines of results in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from bench.staleness.summary import Spread, by
from bench.staleness_real.cells import MEANING, RATES, SUMS, fresh_arm
from bench.staleness_real.precision import precision_table

Result = Mapping[str, Any]


def tables(results: Sequence[Result]) -> str:
    """Best rate of each arm against its own lag 0, then every rate, then what the runs measured.

    Cells of `--precision` have a table of their own.
    """
    if all(one.get("experiment") == SUMS for one in results):
        return precision_table(results)
    valid = [one for one in results if one["valid"]]
    lags = sorted({one["lag"] for one in valid} | {0})
    seeds = {one["seed"] for one in valid}
    wall = sum(one["wall_s"] for one in results)
    return "\n\n".join([
        "# Staleness, in real runs: the numbers",
        f"`python -m bench.staleness_real`: {len(valid)} runs, at most {len(seeds)} seeds in a cell, "
        f"{wall / 3600:.1f} hours one after the other. {len(results) - len(valid)} more runs were left out: their mean "
        "lag with a full lead was not the forced one. Mean ± standard deviation over seeds, in brackets how many.",
        "## Every arm at its best rate",
        "The rate with the largest mean area under the curve, chosen for each lag. *Area*: mean score of the run's "
        "evaluations. *Kept*: the end at the largest lag as a share of the arm's own end at lag 0. There every "
        "ratio is 1, and the arms without a critic are one and the same: they share those runs.",
        _best(valid, lags),
        "## Every rate",
        _rates(valid, "end", lags), _rates(valid, "area", lags),
        "## What the runs measured at the largest lag",
        "Means over the steps with a full lead, at the best rate.",
        _measured(valid, lags[-1]),
    ]) + "\n"


def _best(valid: Sequence[Result], lags: Sequence[int]) -> str:
    rows = []
    for arm in _arms(valid):
        found = [_at_best(valid, arm if lag else fresh_arm(arm), lag) for lag in lags]
        cells = [(_cell(of, "end"), _cell(of, "area"), f"{of[0]['rate']:g}" if of else "") for of in found]
        fresh, old = found[0], found[-1]
        share = "" if not (fresh and old) else f"{_mean(old, 'end') / max(_mean(fresh, 'end'), 1e-9):.0%}"
        lag = "" if not old else f"{_mean(old, 'mean_lag'):.1f}"
        rows.append([f"`{arm}`: {MEANING[arm]}", *chain.from_iterable(cells), share, lag])
    header = ["arm", *chain.from_iterable((f"lag {lag}: end", "area", "rate") for lag in lags), "kept", "mean lag"]
    return _table(header, rows)


def _arms(valid: Sequence[Result]) -> list[str]:
    """Arms that were run, in the order of their meanings."""
    return [arm for arm in MEANING if any(one["arm"] == arm for one in valid)]


def best_rate(valid: Sequence[Result], arm: str, lag: int) -> float | None:
    """The rate with the largest mean area; of rates with fewer seeds than another, none is chosen."""
    areas = {rate: spread for (a, k, rate), spread in by(valid, "arm", "lag", "rate", value="area").items()
             if (a, k) == (arm, lag)}
    most = max((len(spread.values) for spread in areas.values()), default=0)
    return max((rate for rate in areas if len(areas[rate].values) == most), key=lambda r: areas[r].mean, default=None)


def _rates(valid: Sequence[Result], value: str, lags: Sequence[int]) -> str:
    spreads = by(valid, "arm", "lag", "rate", value=value)
    rates = sorted({one["rate"] for one in valid} or RATES)
    rows = [[f"`{arm}`", *(_shown(spreads.get((arm, lag, rate))) for lag in lags for rate in rates)]
            for arm in _arms(valid)]
    return _table([value, *(f"lag {lag}, {rate:g}" for lag in lags for rate in rates)], rows)


def _measured(valid: Sequence[Result], stale: int) -> str:
    keys = sorted({key for one in valid for key in one["means"]})
    rows = []
    for arm in _arms(valid):
        old = _at_best(valid, arm, stale)
        found = {key: [one["means"][key] for one in old if key in one["means"]] for key in keys}
        rows.append([f"`{arm}`", *(f"{sum(v) / len(v):.3g}" if v else "" for v in found.values())])
    return _table(["arm", *(f"`{key}`" for key in keys)], rows)


def _at_best(valid: Sequence[Result], arm: str, lag: int) -> list[Result]:
    rate = best_rate(valid, arm, lag)
    return [one for one in valid if (one["arm"], one["lag"], one["rate"]) == (arm, lag, rate)]


def _mean(results: Sequence[Result], value: str) -> float:
    return Spread(tuple(one[value] for one in results)).mean


def _cell(results: Sequence[Result], value: str) -> str:
    return _shown(Spread(tuple(one[value] for one in results)) if results else None)


def _shown(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread} ({len(spread.values)})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
