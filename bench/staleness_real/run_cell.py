"""Run a cell by `streamrl launch`, and keep what the tables need of its record."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.staleness_real.cells import Cell
from streamrl.errors import RunFailedError
from streamrl.launch import EXIT_INTERRUPTED
from streamrl.metrics.run_record import RunRecord, read_run

KEPT = (
    "ess/token", "ess/sequence_clipped", "drift/m2", "policy/clip_fraction", "keep/veto", "ess/kept_fraction",
    "policy/grad_norm", "entropy/mean", "lr/scale", "ratio/max", "keep/opsm", "trace/fraction",
    "critic/explained_variance", "critic/return_explained_variance",
)
"""Metrics of which the mean over the steps with a full lead is kept."""


def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Run it and read its record; its directory is removed, the start models of the seeds stay in `folder`.

    Raises:
        RunFailedError: the run failed; its directory stays.
        KeyboardInterrupt: it was interrupted.
    """
    run_dir = folder / cell.name
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [*cell.overrides(), f"run.dir={run_dir}", f"policy.tiny.cache_dir={folder / 'models'}"]
    began = time.monotonic()
    log_path = folder / f"{cell.name}.log"
    with log_path.open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "streamrl.cli", "launch", *overrides], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)  # with the time of the run's own processes
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        raise RunFailedError(f"{cell.name} ended with status {code}: see {log_path}", code)
    result = {**measured(cell, read_run(run_dir)), "wall_s": round(time.monotonic() - began, 1),
              "cpu_s": round(usage.ru_utime + usage.ru_stime, 1)}
    shutil.rmtree(run_dir)
    log_path.unlink()
    return result


def measured(cell: Cell, record: RunRecord) -> dict[str, Any]:
    """The line of a finished run."""
    assert record.summary is not None
    curve = [(int(row["eval/version"]), row["eval/score"]) for row in record.rows if "eval/score" in row]
    settled = [row for row in record.rows if row["step"] > cell.lag and "lag/token_mean" in row]
    return {
        "experiment": cell.experiment, "arm": cell.arm, "lag": cell.lag, "rate": cell.rate, "seed": cell.seed,
        "num_steps": cell.num_steps, "weights": cell.weights, "rollout": rollout(record),
        "mean_lag": round(record.summary.lag_mean, 3),
        "settled_lag": round(statistics.fmean(row["lag/token_mean"] for row in settled), 3),
        "max_lag": record.summary.lag_max, "num_lag_violations": record.summary.num_lag_violations,
        "curve": [[version, round(score, 4)] for version, score in curve],
        "start": curve[0][1], "end": curve[-1][1], "area": round(area(curve), 4),
        "means": {key: float(f"{statistics.fmean(values):.4g}") for key in KEPT
                  if (values := [row[key] for row in settled if key in row])},
        "num_skipped_steps": sum(row.get("policy/num_skipped_steps", 0.0) for row in record.rows),
    }


def rollout(record: RunRecord) -> dict[str, float]:
    """Engine and learner at lag 0 in the first step and in the last eighth, and the engine's speed.

    Above lag 0 the first step alone trains on the learner's own version. `tokens_per_busy_s` counts the tokens of
    evaluations too, and of the time what passed while the engine had sequences.
    """
    at_lag_0 = [(row["step"], row["drift/mismatch"]) for row in record.rows if "drift/mismatch" in row]
    late = [value for step, value in at_lag_0 if step > record.rows[-1]["step"] * 7 / 8]
    found = {"mismatch_first": at_lag_0[0][1]} if at_lag_0 else {}
    if late:
        found["mismatch_last"] = statistics.fmean(late)
    last = next((row for row in reversed(record.rows) if "hub/actor_s" in row), {})
    if last and (busy_s := last["hub/actor_s"] - last["hub/actor_idle_s"]) > 0:
        found["tokens_per_busy_s"] = last["hub/tokens_generated"] / busy_s
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def area(curve: Sequence[tuple[int, float]]) -> float:
    """Mean score over the run: the trapezoids between evaluations, divided by the versions that they span."""
    pieces = [(b - a) * (x + y) / 2 for (a, x), (b, y) in zip(curve, curve[1:], strict=False)]
    return sum(pieces) / (curve[-1][0] - curve[0][0])


def append(result: dict[str, Any], path: Path) -> None:
    """One line, in the file before the next cell begins; a line that a crash cut short is dropped."""
    lines = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.truncate(lines.rfind(b"\n") + 1)
        file.write(json.dumps(result).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def finished(path: Path) -> list[dict[str, Any]]:
    """The lines so far; one that a crash cut short is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
