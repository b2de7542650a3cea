"""From the curves of the jobs to one record per run, and to means over seeds. Pure: plain data in, plain data out."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FINAL_POINTS = 4
"""The final score is the mean of the last four evaluations: 100 updates, so that one lucky moment does not count."""
COLLAPSED = 0.5
"""A run has collapsed if its final score is below this share of the best arm's at lag 0."""
KEPT_GOAL, LOST_GOAL = 0.95, 0.5

Run = Mapping[str, Any]


def run_records(results: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Part -> one record per run: who it was, its final score, area under the curve, lowest ESS, and its curves."""
    parts: dict[str, list[dict[str, Any]]] = {"A": [], "B": [], "C": [], "D": []}
    for result in results:
        plan = result["plan"]
        for one in result["runs"]:
            record = {"arm": plan["arm"], "final": final(one["scores"]), "area": mean(one["scores"])}
            if result["part"] == "D":
                record |= _driven(one, plan)
            else:
                record |= {"denominator": plan["denominator"]} if result["part"] == "B" else {}
                record |= {
                    **one["member"],
                    "lowest_ess_token": min(one["ess_token"]),
                    "lowest_ess_sequence": min(one["ess_sequence"]),
                    "clipped": mean(one["clipped"]),
                    "final_entropy": final(one["entropies"]),
                    "scores": [round(x, 3) for x in one["scores"]],
                    "ess_sequence": [round(x, 3) for x in one["ess_sequence"]],
                }
            parts[result["part"]].append(_short(record))
    for records in parts.values():
        records.sort(key=lambda r: (r["arm"], str(r.get("denominator")), r.get("lr", 0), r.get("lag", 0), r["seed"]))
    return parts


def _driven(one: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """A run of part D; the slow phase are the points whose every tick had the high delay."""
    num_points = len(one["scores"])
    ticks = [(i + 1) * plan["eval_every"] for i in range(num_points)]
    low_end, high_end = plan["num_ticks"] / 6, 4 * plan["num_ticks"] / 6
    slow = [i for i, tick in enumerate(ticks) if low_end < tick - plan["eval_every"] + 1 and tick <= high_end]
    updates = one["num_updates"]
    return {
        "bound": one["driver"]["bound"], "lr": one["driver"]["lr"], "seed": one["driver"]["seed"],
        "slow_end": one["scores"][slow[-1]], "slow_mean": mean([one["scores"][i] for i in slow]),
        "slow_lowest_ess": min(one["ess_sequence"][i] for i in slow),
        "slow_updates": updates[slow[-1]] - updates[slow[0] - 1] if slow[0] else updates[slow[-1]],
        "num_updates": updates[-1], "modes": sorted(set(one["modes"])),
        "scores": one["scores"], "lags": one["lags"], "bounds": one["bounds"], "ess_sequence": one["ess_sequence"],
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds, 0 for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if len(self.values) > 1 else f"{self.mean:.2f}"


def by(records: Sequence[Run], *names: str, value: str | Callable[[Run], float] = "final") -> dict[Any, Spread]:
    """Spread over seeds of one field (or of a function of the record) for every combination of `names`."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        key = tuple(record[name] for name in names)
        groups[key[0] if len(key) == 1 else key].append(value(record) if callable(value) else record[value])
    return {key: Spread(tuple(values)) for key, values in groups.items()}


def best_fresh(records: Sequence[Run]) -> float:
    """Mean final score of the best arm at lag 0: the yardstick of collapse."""
    return max(s.mean for (_, lag), s in by(records, "arm", "lag").items() if lag == 0)


def kept_share(records: Sequence[Run], arm: str, lag: int, *, chance: float = 0.0) -> float:
    """Mean final score at `lag` as a share of the arm's own at lag 0, both counted from `chance`."""
    finals = by(records, "arm", "lag")
    return (finals[arm, lag].mean - chance) / (finals[arm, 0].mean - chance)


def collapsed_share(records: Sequence[Run], arm: str, lag: int) -> float:
    """Share of seeds whose final score is below half of the best arm's at lag 0."""
    limit = COLLAPSED * best_fresh(records)
    finals = by(records, "arm", "lag")[arm, lag].values
    return sum(value < limit for value in finals) / len(finals)


@dataclass(frozen=True, slots=True)
class Difference:
    """One cell of the tables, here and in the committed results."""

    cell: str
    here: Spread
    committed: Spread

    @property
    def within(self) -> bool:
        """Means as near as the spread over seeds of both allows: three standard errors, and never less than 0.03."""
        count = len(self.here.values)
        error = ((self.here.deviation**2 + self.committed.deviation**2) / count) ** 0.5
        return abs(self.here.mean - self.committed.mean) <= max(0.03, 3.0 * error)


def compare(here: Mapping[str, Sequence[Run]], committed: Mapping[str, Sequence[Run]]) -> list[Difference]:
    """Final scores of all cells that both have."""
    names = {"A": ("arm", "lag"), "B": ("arm", "denominator", "lag"), "C": ("arm", "lr", "lag"), "D": ("arm", "bound")}
    found = []
    for part, keys in names.items():
        ours, theirs = by(here[part], *keys), by(committed[part], *keys)
        found += [
            Difference(" ".join([part, *(f"{n}={k}" for n, k in zip(keys, key, strict=True))]), ours[key], theirs[key])
            for key in ours if key in theirs
        ]
    return found


def final(values: Sequence[float]) -> float:
    return mean(values[-FINAL_POINTS:])


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _short(record: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
