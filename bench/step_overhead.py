"""Processor time of one step of a launched quickstart, by process and by thread: what is spent beside the model.

    learner   main: the training loop                  other: samples' writer, autograd
    actor     main: the event loop (episodes, tokens)  other: the engine's thread (the model), the hub's client, ...
    hub       main: the ledger                         other: sockets, the weight server

Processor time, unlike wall time, hardly depends on what else the machine does. A step is 16 groups of 8 answers of at
most 12 tokens. With --against the runs of another checkout alternate with those of this one, and are its baseline.

Run: python -m bench.step_overhead [--quick] [--against ../other-checkout]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.record import exit_status, record, shared_arguments

WORDS = (
    "experiment=quickstart", "eval.num_samples=0", "checkpoint.every_steps=0", "launch.num_actors=2",
)
ROLES = {"learner.hub": "hub", "learner": "learner", "actors": "actor"}
WARM_UP_STEPS, LAST_STEPS = 20, 10
POLL_S = 0.1
PATIENCE_S = 600.0

Use = dict[str, float]
"""Seconds of processor time: `<role>.main`, `<role>.other`; actors together."""


def processes_of(root: int) -> dict[psutil.Process, str]:
    """The run's processes and their roles."""
    found = {}
    for process in psutil.Process(root).children(recursive=True):
        words = process.cmdline()
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if module in ROLES:
            found[process] = ROLES[module]
    return found


def use_of(processes: dict[psutil.Process, str]) -> Use:
    use = {f"{role}.{part}": 0.0 for role in ROLES.values() for part in ("main", "other")}
    for process, role in processes.items():
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            seconds = int((thread / "schedstat").read_text().split()[0]) * 1e-9
            use[f"{role}.{'main' if int(thread.name) == process.pid else 'other'}"] += seconds
    return use


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def one_run(tree: Path, num_steps: int) -> tuple[Use, list[dict[str, Any]]]:
    """Milliseconds of processor time per step between the warm-up and the end, and the rows of that time."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        words = [*WORDS, f"trainer.num_steps={num_steps}", f"run.dir={metrics.parent}"]
        with (Path(folder) / "log").open("w+") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "streamrl.cli", "launch", *words], cwd=folder, env=environment, stdout=log,
                stderr=log,
            )
            try:
                first = _wait_for_rows(run, metrics, WARM_UP_STEPS)
                processes = processes_of(run.pid)
                before, first = use_of(processes), num_rows(metrics)
                _wait_for_rows(run, metrics, num_steps - LAST_STEPS)
                after, last = use_of(processes), num_rows(metrics)
            except RuntimeError:
                log.seek(0)
                sys.stderr.write(log.read())
                raise
            finally:
                run.wait(PATIENCE_S)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()][first:last]
    return {name: 1e3 * (after[name] - before[name]) / (last - first) for name in before}, rows


def _wait_for_rows(run: subprocess.Popen, path: Path, count: int) -> int:
    until = time.monotonic() + PATIENCE_S
    while (found := num_rows(path)) < count:
        if run.poll() is not None or time.monotonic() > until:
            run.terminate()
            raise RuntimeError(f"the run has {found} rows and {count} were wanted: exit status {run.poll()}")
        time.sleep(POLL_S)
    return found


def not_compute(rows: list[dict[str, Any]]) -> float:
    """Share of the learner's step that is neither waiting nor forward, backward and optimizer."""
    busy = sum(row["time/step_s"] - row["time/wait_s"] for row in rows)
    return 1.0 - sum(row["time/forward_backward_s"] + row["time/optimizer_s"] for row in rows) / busy


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--against", type=Path, help="another checkout, the baseline")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    repeats, num_steps = (1, 60) if arguments.quick else (arguments.repeats, arguments.steps)
    trees = {"this": Path(__file__).parents[1]}
    if arguments.against is not None:
        trees["other"] = arguments.against.resolve()
    found: dict[str, list[Use]] = {name: [] for name in trees}
    shares: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(repeats):
        for name, tree in trees.items():
            use, rows = one_run(tree, num_steps)
            use["total"] = sum(use.values())
            found[name].append(use)
            shares[name].append(100 * not_compute(rows))
            print(name, {part: round(value, 1) for part, value in use.items()}, file=sys.stderr)
    return exit_status(report(found, shares, num_steps, arguments.seed), arguments.check)


def report(
    found: dict[str, list[Use]], shares: dict[str, list[float]], num_steps: int, seed: int
) -> list[dict[str, Any]]:
    params = {"words": " ".join(WORDS), "num_steps": num_steps, "actors": 2, "threads": 1}

    def line(name: str, unit: str, values: dict[str, list[float]]) -> dict[str, Any]:
        middle = {tree: statistics.median(numbers) for tree, numbers in values.items()}
        baseline = {
            "name": "the other checkout", "value": middle["other"], "unit": unit, "source": "this bench",
            "version": "--against", "measured_here": True,
        } if "other" in middle else None
        return record(name, middle["this"], unit, "lower", values["this"], params, baseline, seed=seed)

    parts = list(found["this"][0])
    lines = [
        line(f"step_overhead.cpu.{part}", "ms", {tree: [use[part] for use in uses] for tree, uses in found.items()})
        for part in parts
    ]
    return [*lines, line("step_overhead.learner_not_compute", "%", shares)]


if __name__ == "__main__":
    sys.exit(main())
