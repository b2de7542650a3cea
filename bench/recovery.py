"""How long after kill -9 of a learner is its next new step trained, by the number of logged steps to train again?

The quickstart at one actor; checkpoints decide how many steps lie between the last one and the kill: one after every
tenth step and a kill at the tenth for 0, else the one before the first step alone. Counted is the time from the signal
to the first step that had not been trained before, in the run's own rows of metrics: the start of the processes, the
steps that are trained again, and the first new one.

Run: python -m bench.recovery [--behind 0,10,100] [--repeats 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.record import exit_status, record, shared_arguments

CHECKPOINT_AT = 10
MORE_STEPS = 5
PATIENCE_S = 300.0
LONGEST_LINE = 65_536


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--behind", default="0,10,100", help="logged steps after the checkpoint, separated by commas")
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    lines = []
    for behind in (int(text) for text in arguments.behind.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = [measured(behind, arguments.seed + number, Path(folder)) for number in range(repeats)]
        seconds = [one["seconds"] for one in found]
        lines.append(record(
            f"recovery.seconds_to_next_step.behind{behind}", statistics.median(seconds), "s", "lower", seconds,
            {"behind": [one["behind"] for one in found], "experiment": "quickstart", "seed": arguments.seed},
            seed=arguments.seed,
        ))
    return exit_status(lines, arguments.check)


def measured(behind: int, seed: int, folder: Path) -> dict[str, Any]:
    """Seconds from the kill to the next new step, and how many steps were trained again."""
    run_dir = folder / f"{behind}-{seed}"
    kill_at, every = (behind, behind + MORE_STEPS) if behind else (CHECKPOINT_AT, CHECKPOINT_AT)
    words = ["experiment=quickstart", f"run.dir={run_dir}", f"run.seed={seed}", f"checkpoint.every_steps={every}",
             f"trainer.num_steps={kill_at + MORE_STEPS + CHECKPOINT_AT}"]
    with subprocess.Popen(
        [sys.executable, "-m", "streamrl.cli", "launch", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            return _killed(launcher, run_dir, kill_at, 0 if behind else CHECKPOINT_AT)
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(PATIENCE_S)


def _killed(launcher: subprocess.Popen[bytes], run_dir: Path, kill_at: int, checkpoint: int) -> dict[str, Any]:
    wait(launcher, lambda: last_step(run_dir) >= kill_at)
    wait(launcher, lambda: not checkpoint or (run_dir / f"ckpt-{checkpoint:08d}").is_dir())
    os.kill(_learner(launcher.pid), signal.SIGKILL)
    killed, last = time.monotonic(), last_step(run_dir)
    wait(launcher, lambda: last_step(run_dir) > last)
    return {"seconds": round(time.monotonic() - killed, 2), "behind": last - checkpoint}


def last_step(run_dir: Path) -> int:
    """The last step in the run's metrics; 0 before there is one, or while its line is being written."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, IndexError, KeyError, ValueError):
        return 0


def _learner(launcher: int) -> int:
    """The process of the learner's only rank, a child of the launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "learner" in words:
            return int(child)
    raise RuntimeError("the launcher has no learner")


def wait(launcher: subprocess.Popen[bytes], is_done: Callable[[], bool]) -> None:
    """Look every 10 ms, the resolution of what is measured. Raises RuntimeError, TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    while not is_done():
        if launcher.poll() is not None:
            raise RuntimeError(f"the run ended with status {launcher.returncode} before the step was trained")
        if time.monotonic() > until:
            raise TimeoutError("the run does not go on")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
