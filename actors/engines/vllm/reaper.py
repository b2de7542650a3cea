"""python -m actors.engines.vllm.reaper PID MARK [FOLDER]: kills an actor's engine processes once the actor is gone.

vLLM runs the model in child processes, which a kill -9 of their parent does not end. The reaper waits for the parent on
a process handle, which costs nothing and cannot mistake a reused process id. The group is known by a mark in its
environment, which every descendant inherits, also while the engine is still starting.
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
"""Environment variable of every process that belongs to one engine."""

_KILL_DEADLINE_S = 5.0


def group_pids(mark: str) -> list[int]:
    """Process ids that carry the mark; python's resource tracker is left alone: it ends after the others."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is not ours
        if command and b"resource_tracker" not in command:
            found.append(int(entry.name))
    return found


def kill_group(mark: str) -> None:
    """Kill until no process carries the mark, for a few seconds at most."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while (left := group_pids(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.05)


def main() -> int:
    parent, mark = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whatever ends the actor must not end its reaper first
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        handle = None
    if handle is not None and os.getppid() == parent:
        select.select([handle], [], [])
    kill_group(mark)
    for folder in sys.argv[3:]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
