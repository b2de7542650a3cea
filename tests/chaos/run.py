"""Runs seeds of the chaos bench, each a cluster of real processes under faults, and checks their histories.

    python -m tests.chaos.run --seeds 50 --seconds 8 --faults 22 --record docs/results/chaos
    python -m tests.chaos.run --first-seed 17          one seed again: the same faults at the same times

Prints one line of JSON a seed and one for all; exit 1 if a guarantee was broken, a run did not end, or (with --record)
a crash point was never hit or a deadline after a fault was missed. Histories of failed seeds stay under --keep.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from streamrl.config.load import load_config
from tests.chaos.checker import check
from tests.chaos.cluster import Cluster, free_ports
from tests.chaos.crash_points import NAMES, Armed
from tests.chaos.deadlines import recoveries
from tests.chaos.history import read_history
from tests.chaos.nemesis import WEIGHTS, Fault, schedule
from tests.chaos.processes import ChaosSpec, fork

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
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    failure: str = ""
    history: str = ""
    """Where that of a failed seed is kept."""

    @property
    def ok(self) -> bool:
        return not self.violations and not self.failure

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self.seed, "ok": self.ok, "seconds": round(self.seconds, 1), "counts": dict(self.counts),
            "faults": sum(self.faults.values()), "points": dict(self.points), "violations": self.violations[:5],
            "late": self.late, "failure": self.failure, "history": self.history,
        }


def run_seed(seed: int, folder: Path, faults: list[Fault], seconds: float, mutant: str, over: Connection) -> None:
    """One run, after which `over` hears that the next may begin; then what its history says."""
    ports = free_ports("127.0.0.1", 2)
    config = load_config([*WORDS, f"run.seed={seed}", f"hub.weights_port={ports[1]}"])
    spec = ChaosSpec(folder, seed, config, Armed(), *ports, mutant=mutant)
    began, failure = time.monotonic(), ""
    try:
        Cluster(spec).run(faults, seconds)
    except TimeoutError as error:
        failure = str(error)
    took = time.monotonic() - began
    over.send(None)
    events = read_history(spec.history)
    result, times = check(events), recoveries(events, spec.actors_per_process)
    over.send(SeedResult(
        seed, took, result.counts, result.violations,
        Counter(event["kind"] for event in events if event["event"] == "fault"),
        Counter(event["point"] for event in events if event["event"] == "crash"), dict(times.times), times.missed,
        failure,
    ))


class Seeds:
    """Runs one seed at a time, each in a process of its own, which checks its history while the next one runs."""

    def __init__(self, keep: Path | None, mutant: str = "") -> None:
        self.results: list[SeedResult] = []
        self._keep, self._mutant = keep, mutant
        self._checking: list[tuple[int, Path, Connection]] = []

    def run(self, seed: int, faults: list[Fault], seconds: float) -> None:
        """Returns when its processes have ended."""
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        mine, its = Pipe()
        sys.stdout.flush()
        fork(lambda: run_seed(seed, folder, faults, seconds, self._mutant, its) or 0)
        its.close()
        with suppress(EOFError):
            mine.recv()
        self._checking.append((seed, folder, mine))
        for one in [one for one in self._checking if one[2].poll()]:
            self._take(one)

    def finish(self) -> list[SeedResult]:
        """All results, once every history is checked."""
        for one in list(self._checking):
            self._take(one)
        return self.results

    def _take(self, one: tuple[int, Path, Connection]) -> None:
        self._checking.remove(one)
        seed, folder, connection = one
        try:
            result = connection.recv()
        except EOFError:
            result = SeedResult(seed, 0.0, failure="the seed's process ended without a result: see standard error")
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if self._keep is not None and not (result.ok and not result.late):
            kept = self._keep / folder.name
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("ranks", "shm"))
            result.history = str(kept / "history")
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(result.summary()), flush=True)
        self.results.append(result)


def missed_points(results: list[SeedResult]) -> list[Fault]:
    """Faults for the crash points that no seed came past, one after the other."""
    missed = [name for name in NAMES if not any(name in one.points for one in results)]
    return [Fault(1.0 + PER_POINT_S * at, "crash", point=name) for at, name in enumerate(missed)]


def words() -> argparse.Namespace:
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
    return parser.parse_args()


def main() -> int:
    arguments = words()
    torch.set_num_threads(1)
    weights = {kind: WEIGHTS[kind] for kind in arguments.only.split(",")} if arguments.only else None
    began, seeds = time.monotonic(), Seeds(arguments.keep, arguments.mutant)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if time.monotonic() - began > arguments.budget_s:
            break
        faults = schedule(seed, arguments.seconds, arguments.faults, weights=weights)
        seeds.run(seed, faults, arguments.seconds)
    results = seeds.finish()
    if arguments.record is not None and (faults := missed_points(results)):
        seeds.run(arguments.first_seed + arguments.seeds, faults, PER_POINT_S * (len(faults) + 1))
        seeds.finish()
    record = totals(results, time.monotonic() - began)
    print(json.dumps(record), flush=True)
    if arguments.record is None:
        return 0 if all(one.ok for one in results) else 1
    arguments.record.mkdir(parents=True, exist_ok=True)
    (arguments.record / f"{record['started']}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(one.ok for one in results) and not record["points_missed"] and not record["late"] else 1


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
        "late": [f"seed {one.seed}: {text}" for one in results for text in one.late],
        "histories": [one.history for one in results if one.history],
        "recovery_s": {
            kind: {"n": len(found), "p50": round(statistics.median(found), 3),
                   "p99": round(sorted(found)[min(len(found) - 1, int(0.99 * len(found)))], 3),
                   "max": round(max(found), 3)}
            for kind, found in sorted(times.items())
        },
    }


if __name__ == "__main__":
    sys.exit(main())
