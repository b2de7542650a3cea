"""Launched runs whose learner, hub and actors are killed at random moments, some on a disk that fills up meanwhile.

    python -m tests.chaos.launched --runs 10 --record docs/results/chaos
    python -m tests.chaos.launched --first-seed 7 --runs 1      one again: the same victims at the same moments

Each run is a whole `streamrl launch` of the quickstart with keys. It must end by itself, after `streamrl resume` where
the launcher ended and names that; then `streamrl replay` must find every version equal bit for bit, and `streamrl
verify` must agree with its bundle. Every third run has a small disk of its own (tmpfs) that is full for six seconds.
Prints a line a run; exit 1 if one failed, 2 if nothing can be mounted here.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.environment import environment_stamp
from tests.chaos.full_disk import FULL_S, NoMount, fill, small_disk
from tests.flow.processes import SLOW, RunHarness, wait_until

NUM_STEPS = 12
WORDS = (
    f"trainer.num_steps={NUM_STEPS}", "checkpoint.every_steps=4", "launch.num_actors=2", "eval.every_steps=10",
    "checkpoint.export_hf=false", "hub.dead_after_s=2", *SLOW,
)
VICTIMS = ("learner", "hub", "actor")
MAX_RESUMES = 4
FULL_EVERY = 3
DISK_MB = 24


class LaunchedRun:
    """One run, its faults, and what is asked of it afterwards."""

    def __init__(self, seed: int, harness: RunHarness) -> None:
        self.seed, self.harness, self.chance = seed, harness, random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.num_resumes = 0

    def play(self, disk: Path | None) -> dict[str, Any]:
        """Play the run and report it. Raises AssertionError: a guarantee was broken."""
        harness, began = self.harness, time.monotonic()
        for words in (("keys", "new", "keys"), ("keys", "add", "keys", "other")):
            self._command(*words)
        launch = harness.launch(*WORDS, f"hub.keys={harness.path / 'keys'}")
        victims = self.chance.sample(VICTIMS, k=len(VICTIMS))
        moments = sorted(self.chance.uniform(0.5, 0.8 * NUM_STEPS) for _ in victims)
        full_at = self.chance.uniform(0.5, 0.6 * NUM_STEPS) if disk is not None else None
        filler = threading.Thread(target=self._fill, args=(disk, full_at)) if disk is not None else None
        if filler is not None:
            filler.start()
        for moment, victim in zip(moments, victims, strict=True):
            launch = self._resumed(launch, lambda moment=moment: self._step() >= moment)
            time.sleep(self.chance.uniform(0.0, 1.0))  # anywhere in a step: the moment, not a synchronization
            self._kill(victim)
        launch = self._resumed(launch, lambda: False)
        if filler is not None:
            filler.join()
        return {"seed": self.seed, "ok": True, "faults": dict(self.faults), "resumed": self.num_resumes,
                **self._checked(), "seconds": round(time.monotonic() - began, 1)}

    def _resumed(self, launch: subprocess.Popen[bytes], is_reached: Callable[[], bool]) -> subprocess.Popen[bytes]:
        """Wait for a moment, or the end of the run; resume it where the launcher ended and says so."""
        harness = self.harness
        for _ in range(MAX_RESUMES):
            wait_until(partial(_either, launch, is_reached), 300, "the run to go on", harness.logs)
            if launch.poll() is None or launch.returncode == 0:
                return launch
            said = (harness.path / "launch.log").read_text(errors="replace")
            assert "streamrl resume" in said, f"status {launch.returncode}, and no way on is named\n{harness.logs()}"
            self.num_resumes += 1
            launch = harness.start("launch", [sys.executable, "-m", "streamrl.cli", "resume", str(harness.run_dir)])
        raise AssertionError(f"it does not go on\n{harness.logs()}")

    def _checked(self) -> dict[str, Any]:
        run_dir, bundle = self.harness.run_dir, self.harness.path / "run.bundle.tar"
        steps = [row["step"] for row in self.harness.metrics() if "policy/loss" in row]
        assert steps[-1] == NUM_STEPS and len(steps) == len(set(steps)), steps
        wait_until(lambda: not self.harness.leftovers(), 60, "the end of every process", self.harness.logs)
        replayed = re.search(r"(\d+) of (\d+) versions equal", self._command("replay", str(run_dir)))
        assert replayed is not None and replayed[1] == replayed[2], replayed
        self._command("bundle", str(run_dir), "--out", str(bundle))
        agreed = self._command("verify", str(bundle)).count(" agrees:")
        return {"versions_equal": int(replayed[1]), "levels_agree": agreed, "torn_ends_kept": len(
            list((run_dir / "stream").glob("*.cut-*")))}

    def _kill(self, victim: str) -> None:
        found = self._processes(victim)
        if found:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(found), signal.SIGKILL)
                self.faults[victim] += 1

    def _processes(self, victim: str) -> list[int]:
        """Process numbers of a kind of process of the run, in order."""
        if victim == "hub":
            with suppress(OSError, ValueError, KeyError):
                return [int(json.loads((self.harness.run_dir / "hub.json").read_text())["pid"])]
            return []
        launcher, word = self.harness.processes[-1].pid, {"learner": "learner", "actor": "actors"}[victim]
        with suppress(OSError):
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            return [int(one) for one in children if word in Path(f"/proc/{one}/cmdline").read_text().split("\0")]
        return []

    def _fill(self, disk: Path, full_at: float) -> None:
        with suppress(AssertionError):  # it ended before: no fault is counted
            wait_until(lambda: self._step() >= full_at, 300, "the moment")
            fill(disk, FULL_S)
            self.faults["full disk"] += 1

    def _step(self) -> int:
        with suppress(OSError, ValueError):
            return int(self.harness.status()["version"])
        return -1

    def _command(self, *words: str) -> str:
        done = self.harness.command(*words)
        assert done.returncode == 0, f"streamrl {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def _either(launch: subprocess.Popen[bytes], is_reached: Callable[[], bool]) -> bool:
    return is_reached() or launch.poll() is not None


def play(seed: int, folder: Path) -> dict[str, Any]:
    """One run; raises NoMount."""
    with ExitStack() as undo:
        disk = undo.enter_context(small_disk(folder / "disk", DISK_MB)) if seed % FULL_EVERY == 0 else None
        harness = RunHarness(folder)
        if disk is not None:
            harness.run_dir = disk / "run"
        undo.callback(harness.close)
        run = LaunchedRun(seed, harness)
        try:
            return run.play(disk)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return {"seed": seed, "ok": False, "faults": dict(run.faults), "failure": str(error)[-6000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--record", type=Path, default=None, metavar="DIR", help="write launched-TIME.json there")
    options = parser.parse_args()
    results, started = [], f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
    for seed in range(options.first_seed, options.first_seed + options.runs):
        with tempfile.TemporaryDirectory(prefix="launched-") as folder:
            try:
                results.append(play(seed, Path(folder)))
            except NoMount as error:
                print(f"nothing can be mounted here: {error}", file=sys.stderr)
                return 2
        print(json.dumps(results[-1]), flush=True)
    good = sum(one["ok"] for one in results)
    print(f"{good} of {len(results)} runs ended, were replayed equal and verified")
    if options.record is not None:
        text = json.dumps({
            "started": started, "command": f"python -m tests.chaos.launched --first-seed {options.first_seed} "
            f"--runs {options.runs}", "runs": results, "env": environment_stamp(),
        }, indent=1)
        (options.record / f"launched-{started}.json").write_text(text + "\n")
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
