"""Real runs whose disk is full for six seconds at a random moment: each must go on, stop, resume and be read.

    python -m tests.chaos.full_disk --runs 10
    python -m tests.chaos.full_disk --first-seed 7 --runs 1      one again: full at the same moment

Each run has a small disk of its own (tmpfs), which needs the right to mount one. Prints one line of JSON a run and one
for all; exit 1 if a run ended, could not be resumed or could not be read, 2 if nothing can be mounted here.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.flow.processes import ROOT, RunHarness, finished, wait_until

FULL_S = 6.0
WORDS = (
    "trainer.num_steps=5000", "checkpoint.every_steps=4", "launch.num_actors=1", "eval.every_steps=5",
    "checkpoint.export_hf=false",
)


class NoMount(Exception):
    """This process may not mount a file system."""


@contextmanager
def small_disk(folder: Path, megabytes: int = 16) -> Iterator[Path]:
    """A file system of its own. Raises NoMount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError as error:
        raise NoMount(str(error)) from error
    if done.returncode:
        raise NoMount(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def fill(folder: Path, seconds: float) -> None:
    """Leave no byte free for so long; what others free meanwhile is taken, too."""
    until = time.monotonic() + seconds
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        while time.monotonic() < until:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(b"\0" * size):
                        pass
            time.sleep(0.02)  # the disk is full by now
    filler.unlink()


class Round:
    """One run on a small disk."""

    def __init__(self, seed: int, harness: RunHarness, disk: Path) -> None:
        self.seed, self.harness, self.disk = seed, harness, disk
        harness.run_dir = disk / "runs" / "full-001"

    def step(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.harness.run_dir / "status.json").read_text())["version"])
        return -1

    def play(self) -> dict[str, Any]:
        """What happened. Raises AssertionError: what must not."""
        harness, after_s = self.harness, random.Random(self.seed).uniform(0.0, 8.0)
        launch = harness.launch(*WORDS)
        wait_until(lambda: self.step() >= 1, 240, "the first step", harness.logs)
        time.sleep(after_s)
        before = self.step()
        fill(self.disk, FULL_S)
        freed = self.step()
        assert launch.poll() is None, f"the run ended on a full disk\n{harness.logs()}"
        wait_until(lambda: self.step() >= freed + 3 or launch.poll() is not None, 120, "three more steps", harness.logs)
        assert launch.poll() is None, f"the run ended after the disk was full\n{harness.logs()}"
        launch.send_signal(signal.SIGINT)
        assert harness.finish(launch, 120) == 130, harness.logs()
        log = (harness.run_dir / "logs" / "learner.log").read_text(errors="replace")
        lines = {path.name: read_back(path) for path in sorted(harness.run_dir.glob("*.jsonl"))}
        steps = [row["step"] for row in lines["metrics.jsonl"] if "policy/loss" in row]
        reached = steps[-1]
        assert len(steps) == len(set(steps)) and steps == sorted(steps)
        self.command("resume", str(harness.run_dir), f"trainer.num_steps={reached + 2}")
        resumed = [row["step"] for row in read_back(harness.run_dir / "metrics.jsonl") if "policy/loss" in row]
        assert resumed[-2:] == [reached + 1, reached + 2], "it goes on where it was stopped"
        self.command("report", str(harness.run_dir))
        self.command("report", str(harness.run_dir.parent))
        assert "full-001" in (harness.run_dir.parent / "index.html").read_text()
        self.command("samples", str(harness.run_dir))
        assert "finished" in self.command("status", str(harness.run_dir))
        return {
            "seed": self.seed, "ok": True, "full_after_s": round(after_s, 2), "step_when_full": before,
            "step_when_freed": freed, "failed_checkpoints": log.count("was not saved"),
            "steps_without_a_line": reached - len(steps), "stopped_at": reached, "resumed_to": resumed[-1],
        }

    def command(self, *words: str) -> str:
        done = finished([sys.executable, "-m", "streamrl.cli", *words], ROOT, self.harness.popen, deadline_s=600)
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def read_back(path: Path) -> list[dict[str, Any]]:
    """Every line, strictly."""
    text = path.read_text()
    assert text.endswith("\n") or not text, f"{path.name} ends in a torn line"
    return [json.loads(line) for line in text.splitlines()]


def play(seed: int, folder: Path, popen: type[subprocess.Popen[bytes]] = subprocess.Popen) -> dict[str, Any]:
    """Play one run, whose processes `popen` starts; raises AssertionError or NoMount."""
    folder.mkdir(parents=True, exist_ok=True)
    with small_disk(folder / "disk") as disk:
        harness = RunHarness(folder, popen)
        try:
            return Round(seed, harness, disk).play()
        finally:
            harness.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    options = parser.parse_args()
    results = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        with tempfile.TemporaryDirectory(prefix="full-disk-") as folder:
            try:
                result = play(seed, Path(folder) / "run")
            except NoMount as error:
                print(f"nothing can be mounted here: {error}", file=sys.stderr)
                return 2
            except (AssertionError, subprocess.TimeoutExpired) as error:
                result = {"seed": seed, "ok": False, "failure": str(error)[-6000:]}
        results.append(result)
        print(json.dumps(result), flush=True)
    good = sum(result["ok"] for result in results)
    print(json.dumps({"runs": len(results), "ok": good, "full_s": FULL_S}), flush=True)
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
