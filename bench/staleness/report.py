"""Tables of the experiment as Markdown, and the comparison with the committed numbers. Pure: records in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.staleness.arms import ARMS, MEANING
from bench.staleness.policy import NUM_DIGITS
from bench.staleness.summary import (
    COLLAPSED,
    KEPT_GOAL,
    LOST_GOAL,
    Run,
    Spread,
    by,
    collapsed_share,
    compare,
    kept_share,
)

CHANCE = 1.0 / NUM_DIGITS
Parts = Mapping[str, Sequence[Run]]


def tables(results: Mapping[str, Any]) -> str:
    """Everything that was found, as one Markdown page."""
    parts: Parts = results["parts"]
    lags = sorted({record["lag"] for record in parts["A"]})
    seeds = len({record["seed"] for record in parts["A"]})
    head = [
        "# Staleness, simulated: the numbers",
        f"`{results['command']}`: {results['cpu_s']:.0f} CPU seconds on {results['workers']} processes, "
        f"{_wall(results)}. {seeds} seeds, {results['num_steps']} updates, learning rate {results['lr']:g}. Mean ± "
        f"standard deviation over seeds; chance is {CHANCE:.2f}. What it means: "
        "docs/results/staleness.",
        "Final = mean of the last four evaluations. Area = mean of all evaluations. A run has collapsed if its final "
        f"score is below {COLLAPSED:g} of the best arm's at lag 0.",
    ]
    sections = [
        ("Final score by forced lag", _grid(parts["A"], lags, "final")),
        ("Area under the curve by forced lag", _grid(parts["A"], lags, "area")),
        *((f"Lag {lag}", _at_lag(parts["A"], lag)) for lag in lags[-2:]),
        ("Tokens of one row from many versions", _mixed(parts["B"])),
        ("Learning rate against lag", _map(parts["C"], parts["A"], results["lr"])),
        ("The delay goes from 4 to 48 ticks and back", _step_change(parts["D"])),
        ("The goal", "\n".join(goal_lines(parts["A"]))),
    ]
    return "\n\n".join([*head, *(f"## {title}\n\n{body}" for title, body in sections)]) + "\n"


def _wall(results: Mapping[str, Any]) -> str:
    return "in parts (interrupted and resumed)" if results["resumed"] else f"{results['wall_s']:.0f} s of wall time"


def goal_lines(records: Sequence[Run]) -> list[str]:
    """Did `stream_default` keep its score at the two largest lags, and did the uncorrected arm lose half of its own?"""
    lines = []
    for lag in sorted({record["lag"] for record in records})[-2:]:
        kept = kept_share(records, "stream_default", lag)
        lost = 1.0 - kept_share(records, "none", lag)
        above = 1.0 - kept_share(records, "none", lag, chance=CHANCE)
        lines += [
            f"- lag {lag}: `stream_default` keeps {kept:.1%} of its lag-0 score (goal {KEPT_GOAL:.0%}): "
            f"{'met' if kept >= KEPT_GOAL else 'MISSED'}",
            f"- lag {lag}: `none` loses {lost:.1%} of its lag-0 score, {above:.1%} counted from chance (goal "
            f"{LOST_GOAL:.0%}): {'met' if lost >= LOST_GOAL else 'MISSED'}",
        ]
    return lines


def comparison(here: Parts, committed: Parts) -> list[str]:
    """Differences of this run's tables from the committed ones; the last line sums up."""
    found = compare(here, committed)
    equal = sum(d.here.values == d.committed.values for d in found)
    outside = [d for d in found if not d.within]
    lines = [f"  {d.cell}: {d.here} here, {d.committed} committed" for d in outside]
    result = "reproduced" if not outside else f"{len(outside)} cells differ by more than their spread"
    return [*lines, f"{len(found)} cells compared with the committed results: {equal} bit-identical, {result}"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = "|" + "|".join("---" for _ in header) + "|"
    return "\n".join([f"| {' | '.join(row)} |" if row is not None else line for row in (header, None, *rows)])


def _grid(records: Sequence[Run], lags: Sequence[int], value: str) -> str:
    cells = by(records, "arm", "lag", value=value)
    rows = [[f"`{arm}`", *(str(cells[arm, lag]) for lag in lags)] for arm in ARMS if (arm, lags[0]) in cells]
    return _table(["arm", *(f"k = {lag}" for lag in lags)], rows)


def _at_lag(records: Sequence[Run], lag: int) -> str:
    finals = by(records, "arm", "lag")
    columns = {name: by(records, "arm", "lag", value=name) for name in
               ("lowest_ess_token", "lowest_ess_sequence", "clipped", "final_entropy")}  # fmt: skip
    arms = sorted((arm for arm, k in finals if k == lag), key=lambda arm: -finals[arm, lag].mean)
    rows = [
        [
            f"`{arm}`", MEANING[arm], str(finals[arm, lag]), f"{kept_share(records, arm, lag):.0%}",
            f"{collapsed_share(records, arm, lag):.0%}",
            *(f"{columns[name][arm, lag].mean:.3f}" for name in columns),
        ]
        for arm in arms
    ]  # fmt: skip
    header = ["arm", "what it is", "final", "of its lag 0", "collapsed", "lowest token ESS", "lowest trajectory ESS",
              "share bounded", "final entropy"]  # fmt: skip
    return _table(header, rows)


def _mixed(records: Sequence[Run]) -> str:
    finals = by(records, "arm", "denominator", "lag")
    lags = sorted({record["lag"] for record in records})
    rows = [
        [f"`{arm}`", _DENOMINATOR[denominator], *(str(finals[arm, denominator, lag]) for lag in lags)]
        for arm, denominator in sorted({(r["arm"], r["denominator"]) for r in records},
                                       key=lambda pair: (list(ARMS).index(pair[0]), pair[1] != "recorded", pair[1]))
    ]  # fmt: skip
    return _table(["arm", "denominator", *(f"k = {lag}" for lag in lags)], rows)


_DENOMINATOR = {
    "recorded": "recorded when sampled",
    "first": "WRONG: recomputed with the version of the first token",
    "last": "WRONG: recomputed with the version of the last token",
}


def _map(records: Sequence[Run], main: Sequence[Run], main_lr: float) -> str:
    lags = sorted({record["lag"] for record in records})
    finals = by(records, "arm", "lr", "lag")
    finals |= {(arm, main_lr, lag): spread for (arm, lag), spread in by(main, "arm", "lag").items()}
    arms = [arm for arm in ARMS if any(record["arm"] == arm for record in records)]
    rates = sorted({record["lr"] for record in records} | {main_lr})
    rows = [
        [f"`{arm}`", f"{lr:g}", *(_cell(finals.get((arm, lr, lag))) for lag in lags)] for arm in arms for lr in rates
    ]
    return _table(["arm", "learning rate", *(f"k = {lag}" for lag in lags)], rows)


def _cell(spread: Spread | None) -> str:
    return "" if spread is None else str(spread)


def _step_change(records: Sequence[Run]) -> str:
    names = ("slow_updates", "slow_mean", "slow_end", "slow_lowest_ess", "final")
    columns = {name: by(records, "arm", "bound", value=name) for name in names}
    bounds = sorted({record["bound"] for record in records}, key=lambda b: (b == "adaptive", b is None, b or 0))
    rows = []
    for arm in sorted({record["arm"] for record in records}):
        for bound in bounds:
            modes = {m for r in records if (r["arm"], r["bound"]) == (arm, bound) for m in r["modes"]}
            shown = "none" if bound is None else str(bound)
            cells = [columns[name][arm, bound] for name in names]
            rows.append([f"`{arm}`", shown, f"{cells[0].mean:.0f}", *(str(cell) for cell in cells[1:]),
                         ", ".join(sorted(modes - {"off"})) or "-"])  # fmt: skip
    header = ["arm", "lag bound", "updates while slow", "mean score while slow", "score at its end",
              "lowest trajectory ESS while slow", "final score", "breaker was"]  # fmt: skip
    return _table(header, rows)
