"""Runs seeds of the chaos bench, each a cluster of real processes under faults, and checks their histories.

    python -m tests.chaos.run --seeds 50 --seconds 14 --faults 22 --record docs/results/chaos
    python -m tests.chaos.run --first-seed 17          one seed again: the same faults at the same times

Prints one line of JSON a seed and one for all; exit 1 if a guarantee was broken, a run did not end, or (with --record)
a crash point was never hit. Histories of failed seeds stay under --keep.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from streamrl.config.load import load_config
from tests.chaos.checker import check
from tests.chaos.cluster import Cluster, free_ports
from tests.chaos.crash_points import NAMES, Armed
from tests.chaos.history import Event, read_history
from tests.chaos.nemesis import WEIGHTS, Fault, schedule
from tests.chaos.processes import ChaosSpec

WORDS = (
    "experiment=quickstart", "rollout.num_prompts_per_step=8", "rollout.num_responses_per_prompt=256",
    "staleness.eta=4", "staleness.num_lookahead_groups=32", "hub.dead_after_s=1", "hub.heartbeat_s=0.25",
    "hub.advertise=127.0.0.2", "hub.lease_ttl_s=5",
    "samples.num_per_step=0", "trainer.num_steps=1000000", "checkpoint.every_steps=8", "publish.probe_every=0",
)
PER_POINT_S = 5.0
"""From one crash point to the next, where they come one by one: a restart and a few checkpoints."""


@dataclass
class SeedResult:
    """What one seed showed."""

    seed: int
    seconds: float
    counts: Counter[str]
    violations: list[tuple[str, str]]
    faults: Counter[str]
    points: Counter[str]
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.violations and not self.failure

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self.seed, "ok": self.ok, "seconds": round(self.seconds, 1), "counts": dict(self.counts),
            "faults": sum(self.faults.values()), "points": dict(self.points), "violations": self.violations[:5],
            "failure": self.failure,
        }


def run_seed(
    seed: int, folder: Path, *, seconds: float, num_faults: int, mutant: str = "",
    weights: dict[str, int] | None = None, faults: list[Fault] | None = None,
) -> SeedResult:
    """One run and what its history says."""
    ports = free_ports("127.0.0.1", 2)
    config = load_config([*WORDS, f"run.seed={seed}", f"hub.weights_port={ports[1]}"])
    spec = ChaosSpec(folder, seed, config, Armed(), *ports, mutant=mutant)
    began, failure = time.monotonic(), ""
    planned = schedule(seed, seconds, num_faults, weights=weights) if faults is None else faults
    try:
        Cluster(spec).run(planned, seconds)
    except TimeoutError as error:
        failure = str(error)
    events = read_history(spec.history)
    result = check(events)
    return SeedResult(
        seed, time.monotonic() - began, result.counts, result.violations,
        Counter(event["kind"] for event in events if event["event"] == "fault"),
        Counter(event["point"] for event in events if event["event"] == "crash"), recovery(events), failure,
    )


def run_missed(results: list[SeedResult], seed: int) -> list[SeedResult]:
    """One more seed for the crash points that no seed came past, one after the other; none if there are none."""
    missed = [name for name in NAMES if not any(name in one.points for one in results)]
    if not missed:
        return []
    faults = [Fault(1.0 + PER_POINT_S * at, "crash", point=name) for at, name in enumerate(missed)]
    with tempfile.TemporaryDirectory(prefix="chaos-points-") as folder:
        result = run_seed(
            seed, Path(folder) / "points", seconds=PER_POINT_S * (len(missed) + 1), num_faults=0, faults=faults
        )
    print(json.dumps(result.summary()), flush=True)
    return [result]


def recovery(events: list[Event]) -> dict[str, list[float]]:
    """Seconds from each fault to the next batch that is trained after it, by kind of fault."""
    found: dict[str, list[float]] = {}
    waiting: list[tuple[str, float]] = []
    for event in events:
        if event["event"] == "fault":
            waiting.append((event["kind"], event["t"]))
        elif event["event"] == "train":
            for kind, since in waiting:
                found.setdefault(kind, []).append(event["t"] - since)
            waiting.clear()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--faults", type=int, default=22)
    parser.add_argument("--mutant", default="")
    parser.add_argument("--only", default="", help="kinds of faults, by commas; all if empty")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no seed after so many seconds")
    parser.add_argument("--keep", type=Path, default=None, help="histories of failed seeds go here")
    parser.add_argument("--record", type=Path, default=None, help="folder for the record of this run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = {kind: WEIGHTS[kind] for kind in arguments.only.split(",")} if arguments.only else None
    began, results = time.monotonic(), []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if time.monotonic() - began > arguments.budget_s:
            break
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        result = run_seed(
            seed, folder, seconds=arguments.seconds, num_faults=arguments.faults, mutant=arguments.mutant,
            weights=weights,
        )
        print(json.dumps(result.summary()), flush=True)
        results.append(result)
        if arguments.keep is not None and not result.ok:
            shutil.copytree(folder, arguments.keep / folder.name, ignore=shutil.ignore_patterns("ranks", "shm"))
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.record is not None:
        results += run_missed(results, arguments.first_seed + arguments.seeds)
    record = totals(results, time.monotonic() - began)
    print(json.dumps(record), flush=True)
    if arguments.record is not None:
        arguments.record.mkdir(parents=True, exist_ok=True)
        (arguments.record / f"{record['started']}.json").write_text(json.dumps(record, indent=1) + "\n")
    missed = record["points_missed"] if arguments.record is not None else []
    return 0 if all(one.ok for one in results) and not missed else 1


def totals(results: list[SeedResult], seconds: float) -> dict[str, Any]:
    """One record of all seeds."""
    counts, faults, points = (sum((getattr(one, name) for one in results), Counter())
                              for name in ("counts", "faults", "points"))
    times: dict[str, list[float]] = {}
    for one in results:
        for kind, found in one.recovery_s.items():
            times.setdefault(kind, []).extend(found)
    return {
        "started": datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), "command": " ".join(["python -m tests.chaos.run",
                                                                                      *sys.argv[1:]]),
        "seeds": [one.seed for one in results], "failed_seeds": [one.seed for one in results if not one.ok],
        "seconds": round(seconds, 1), "trajectories": counts["trajectories"], "counts": dict(counts),
        "faults": sum(faults.values()), "faults_by_kind": dict(faults),
        "violations": sum(len(one.violations) for one in results), "points_hit": dict(points),
        "points_missed": [name for name in NAMES if name not in points],
        "next_batch_after_fault_s": {
            kind: {"n": len(found), "p50": round(statistics.median(found), 3),
                   "p99": round(sorted(found)[min(len(found) - 1, int(0.99 * len(found)))], 3)}
            for kind, found in sorted(times.items())
        },
    }


if __name__ == "__main__":
    sys.exit(main())
