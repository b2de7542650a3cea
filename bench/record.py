"""One result of a benchmark as one line of JSON: to stdout, and to bench/results/<bench>/<commit>-<stamp>.jsonl.

A line says everything that is needed to judge the number later: the samples, the parameters, the machine, the versions
and the commit. It holds no name of a host or a user, and no path.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.environment import environment_stamp

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
_STARTED = datetime.now(UTC)
_CLOCK = time.perf_counter()
_COMPARE = {"<=": lambda value, limit: value <= limit, ">=": lambda value, limit: value >= limit}


def shared_arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: --seed, --repeats, --quick, --check."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="at most a minute: checks that it runs")
    parser.add_argument("--check", action="store_true", help="exit non-zero if a goal is missed")
    return parser


def record(
    name: str,
    value: float,
    unit: str,
    better: str,
    samples: Sequence[float],
    params: Mapping[str, Any],
    baseline: Mapping[str, Any] | None = None,
    goal: Mapping[str, Any] | None = None,
    *,
    kind: str = "measured",
    seed: int = 0,
    bound: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Print and keep one result; returns the line as a dict.

    Args:
        name: area.metric.variant; the part before the first dot names the folder of results.
        value: the median over `samples`, unless the benchmark says otherwise in `params`.
        better: "lower" or "higher".
        samples: raw repeats, in order.
        params: everything that changes the number.
        baseline: {name, value, unit, source, version, measured_here}.
        goal: {id, op, value} with op "<=" or ">="; whether it is met is worked out here.
    """
    if better not in ("lower", "higher"):
        raise ValueError(f"better={better!r} must be 'lower' or 'higher'")
    line = {
        "schema": SCHEMA,
        "name": name,
        "value": value,
        "unit": unit,
        "better": better,
        "baseline": dict(baseline) if baseline is not None else None,
        "ratio": _ratio(value, baseline, better),
        "goal": {**goal, "met": _COMPARE[goal["op"]](value, goal["value"])} if goal is not None else None,
        "stats": _stats(samples),
        "samples": list(samples),
        "params": dict(params),
        "bound": dict(bound) if bound is not None else None,
        "kind": kind,
        "seed": seed,
        "seconds": round(time.perf_counter() - _CLOCK, 3),
        "command": _command(),
        "started": _STARTED.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "env": environment_stamp(),
    }
    text = json.dumps(line)
    print(text, flush=True)
    commit = (line["env"]["git_commit"] or "unknown")[:12]
    path = RESULTS / name.split(".")[0] / f"{commit}-{_STARTED:%Y%m%dT%H%M%S}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text + "\n")
    return line


def exit_status(lines: Sequence[Mapping[str, Any]], check: bool) -> int:
    """1 if a goal is missed and goals are to be checked; the missed ones go to stderr."""
    missed = [line for line in lines if line["goal"] is not None and not line["goal"]["met"]]
    for line in missed:
        goal = line["goal"]
        text = f"missed {goal['id']}: {line['name']} = {line['value']:g}, goal {goal['op']} {goal['value']:g}"
        print(text, file=sys.stderr)
    return 1 if check and missed else 0


def _ratio(value: float, baseline: Mapping[str, Any] | None, better: str) -> float | None:
    """Ratio to the baseline; above 1 is better, whichever direction is better."""
    if baseline is None or not value or not baseline["value"]:
        return None
    return value / baseline["value"] if better == "higher" else baseline["value"] / value


def _stats(samples: Sequence[float]) -> dict[str, Any]:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    return {
        "n": len(samples),
        "median": statistics.median(samples),
        "iqr": [low, high],
        "min": min(samples),
        "max": max(samples),
        "ci95": None,
    }


def _command() -> str:
    """The command line with paths cut to their last part."""
    module = sys.modules["__main__"].__spec__
    name = f"python -m {module.name}" if module is not None else Path(sys.argv[0]).name
    return " ".join([name, *(Path(word).name if os.sep in word else word for word in sys.argv[1:])])
