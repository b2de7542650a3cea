"""python -m actors.engines.vllm.reaper PID MARK [FOLDER]: ends an actor's engine processes once the actor is gone.

vLLM runs the model in processes of its own, and kill -9 of their parent tells them nothing. The guard waits for the
parent's end on a process handle: it costs nothing and cannot mistake a reused process number. Children
are known by a mark in their environment, which every descendant inherits, also while the engine is still starting.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "STREAMRL_ENGINE_OF"
"""Environment variable of everything that belongs to one engine."""

_SWEEP_S = 5.0


def family(mark: str) -> list[int]:
    """Process ids that carry the mark; python's own clean-up helper is left alone: it goes when the others are gone."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is not ours
        if words and b"resource_tracker" not in words:
            found.append(int(entry.name))
    return found


def end_family(mark: str) -> int:
    """Kill until nobody carries the mark any more; how many it took."""
    ended: set[int] = set()
    deadline = time.monotonic() + _SWEEP_S
    while (left := family(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                ended.add(pid)
            except OSError:
                pass
        time.sleep(0.05)
    return len(ended)


def main() -> int:
    parent, mark = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whatever ends the actor must not end its guard first
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        handle = None
    if handle is not None and os.getppid() == parent:
        select.select([handle], [], [])
    end_family(mark)
    for folder in sys.argv[3:]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
