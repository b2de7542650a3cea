"""Does anything grow while a run goes on for an hour under faults: memory, descriptors, threads, the log?

The quickstart with keys (CURVE), two actors and a fault a minute, in turns: actor-1 is killed, the hub stands still for
three seconds, the learner does, actor-0 does. All processes but actor-1 live from the first minute to the last. Each is
looked at every five seconds; what is compared is the median of the second tenth of the time with that of the last.

Lines: growth of each process's own memory (USS) in MiB an hour, with that of its descriptors and threads among the
parameters; and the bytes by which the log and the whole run directory grow in a step of the last tenth.

Run: python -m bench.soak [--minutes 60] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.record import exit_status, record, shared_arguments
from bench.recovery import last_step, wait

LOOK_S, FAULT_S, STILL_S = 5.0, 60.0, 3.0
NAMES = ("launch", "learner", "hub", "actor-0")
FAULTS = (
    ("actor-1", signal.SIGKILL), ("hub", signal.SIGSTOP), ("learner", signal.SIGSTOP), ("actor-0", signal.SIGSTOP),
)
GOAL_MIB_PER_HOUR = 16.0
WORDS = ("experiment=quickstart", "trainer.num_steps=10000000", "launch.num_actors=2", "eval.num_samples=0",
         "checkpoint.every_steps=100", "checkpoint.export_hf=false", "stream.keep=recovery")


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    minutes, fault_s, look_s = (0.7, 5.0, 1.0) if arguments.quick else (arguments.minutes, FAULT_S, LOOK_S)
    with tempfile.TemporaryDirectory() as folder:
        looks = soaked(Path(folder), 60.0 * minutes, fault_s, look_s, arguments.seed)
    params = {"minutes": minutes, "fault_s": fault_s, "words": list(WORDS), "steps": looks[-1]["step"],
              "num_faults": looks[-1]["num_faults"]}
    return exit_status(lines_of(looks, params, arguments.seed), arguments.check)


def soaked(folder: Path, seconds: float, fault_s: float, look_s: float, seed: int) -> list[dict[str, Any]]:
    """Start the run, break it again and again, and look at it meanwhile."""
    keys, run_dir = folder / "keys", folder / "run"
    subprocess.run([sys.executable, "-m", "streamrl.cli", "keys", "new", str(keys)], check=True, capture_output=True)
    words = [*WORDS, f"run.dir={run_dir}", f"run.seed={seed}", f"hub.keys={keys}"]
    looks: list[dict[str, Any]] = []
    with _launched(words) as launcher:
        wait(launcher, lambda: last_step(run_dir) >= 5)
        began, faults = time.monotonic(), itertools.cycle(FAULTS)
        next_fault, num_faults = began + fault_s, 0
        while (now := time.monotonic()) < began + seconds:
            if launcher.poll() is not None:
                raise RuntimeError(f"the run ended with status {launcher.returncode}")
            found = processes(launcher.pid)
            looks.append({"t": now - began, "num_faults": num_faults, **_files(run_dir),
                          "processes": {name: look for name in NAMES if (look := _look(found.get(name)))}})
            if now >= next_fault:
                next_fault, num_faults = now + fault_s, num_faults + 1
                name, number = next(faults)
                _break(found.get(name), number)
                print(f"{now - began:.0f} s: {signal.Signals(number).name} to {name}, step {looks[-1]['step']}",
                      file=sys.stderr, flush=True)
            time.sleep(look_s)
    return looks


def lines_of(looks: Sequence[dict[str, Any]], params: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Results: a line for each process, one for the log, one for the run directory."""
    tenth = max(1, len(looks) // 10)
    early, late = looks[tenth : 2 * tenth], looks[-tenth:]
    hours = (late[len(late) // 2]["t"] - early[len(early) // 2]["t"]) / 3600
    lines = []
    for name in NAMES:
        pids = {look["processes"][name]["pid"] for look in looks[tenth:] if name in look["processes"]}
        samples = [look["processes"][name]["uss_mib"] for look in looks if name in look["processes"]]
        more = {
            "num_processes": len(pids),
            **{thing: _growth(early, late, name, thing) for thing in ("descriptors", "threads")},
        }
        lines.append(record(
            f"soak.mib_per_hour.{name}", _growth(early, late, name, "uss_mib") / hours, "MiB/h", "lower", samples,
            params | more, goal={"id": "S1", "op": "<=", "value": GOAL_MIB_PER_HOUR}, seed=seed,
        ))
    for thing in ("log_bytes", "run_bytes"):
        grown = [
            (part[-1][thing] - part[0][thing]) / max(1, part[-1]["step"] - part[0]["step"]) for part in (early, late)
        ]
        lines.append(record(f"soak.{thing}_per_step", grown[1], "bytes", "lower", grown,
                            params | {"at_the_end": looks[-1][thing]}, seed=seed))
    return lines


def processes(launcher: int) -> dict[str, psutil.Process]:
    """The processes of a launched run by name."""
    found = {"launch": psutil.Process(launcher)}
    with contextlib.suppress(psutil.Error):
        for child in found["launch"].children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                name = next((word.partition("=")[2] for word in words if word.startswith("actors.actor_id=")), "")
                name = name or ("hub" if "learner.hub" in words else "learner" if "learner" in words else "")
                if name:
                    found.setdefault(name, child)
    return found


def _look(process: psutil.Process | None) -> dict[str, float] | None:
    if process is None:
        return None
    try:
        return {"pid": process.pid, "uss_mib": process.memory_full_info().uss / 2**20, "threads": process.num_threads(),
                "descriptors": process.num_fds()}
    except psutil.Error:
        return None


def _break(process: psutil.Process | None, number: int) -> None:
    if process is None:
        return
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        if number == signal.SIGSTOP:
            threading.Timer(STILL_S, _go_on, [process]).start()


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # the run may have ended meanwhile
        process.resume()


def _files(run_dir: Path) -> dict[str, int]:
    """Bytes of the log and of the whole run directory, and the last step."""
    sizes = {}
    for path in run_dir.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                sizes[path] = path.stat().st_size
    log = sum(size for path, size in sizes.items() if path.is_relative_to(run_dir / "stream"))
    return {"log_bytes": log, "run_bytes": sum(sizes.values()), "step": last_step(run_dir)}


def _growth(early: Sequence[dict[str, Any]], late: Sequence[dict[str, Any]], name: str, thing: str) -> float:
    """The median later less the median earlier."""
    values = [[look["processes"][name][thing] for look in part if name in look["processes"]] for part in (early, late)]
    return statistics.median(values[1]) - statistics.median(values[0])


@contextlib.contextmanager
def _launched(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "streamrl.cli", "launch", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        try:
            yield launcher
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(120)


if __name__ == "__main__":
    sys.exit(main())
