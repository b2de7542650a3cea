"""One warm sandbox: a supervisor that waits for a program, serves it, and is thrown away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict

import psutil

from envs.sandbox.isolation import Case, Execution, Isolation, Limits
from streamrl.processes import Child

START_S = 10.0
GRACE_S = 0.4
"""How much longer than its time a case may take before its sandbox is ended from outside."""
_MAX_FRAME = 256 << 20


class SandboxProcess:
    """Start it from a thread that lives on: the sandbox dies with the thread that started it (PR_SET_PDEATHSIG)."""

    def __init__(self, isolation: Isolation, slot: int, limits: Limits) -> None:
        """`slot` tells apart the sandboxes of this process, from 0 to 255."""
        uid = self._uid = isolation.uid(slot)
        self._work = tempfile.mkdtemp(prefix="streamrl-sandbox-")
        if uid is not None:
            os.chown(self._work, uid, uid)
        self._child = Child(
            isolation.command(self._work, uid, tmp_bytes=limits.file_bytes), environment={}, parent_watch=False,
            answers=True, keep_errors=True, folder="/",
        )
        self._lost = False
        self.complaint = ""
        """What the start printed, where it failed."""

    def run(self, program: str, cases: Sequence[Case], limits: Limits, total_s: float) -> list[Execution]:
        """Run `program` once for each case, in order.

        Fewer executions than cases come back if all of them took `total_s`: the last one then is a "timeout".
        """
        request = {"program": program, "cases": [asdict(case) for case in cases], "limits": asdict(limits)}
        done: list[Execution] = []
        end = time.monotonic() + total_s
        case_start = time.monotonic()
        try:
            self._read(min(START_S, total_s))
            data = json.dumps(request).encode()
            self._child.send(struct.pack("<I", len(data)) + data, time.monotonic() + min(START_S, total_s))
            for _ in cases:
                case_start = time.monotonic()
                answer = self._read(min(limits.timeout_s + GRACE_S, end - case_start))
                done.append(_execution(answer))
        except (EOFError, TimeoutError):
            seconds = time.monotonic() - case_start
            timed_out = self._child.poll() is None
            self._lost = True
            done.append(Execution("timeout" if timed_out else "lost", seconds=seconds))
            if not timed_out:
                self.complaint = self._child.errors(wait_s=1.0).strip()
        return done

    def close(self) -> None:
        """End the sandbox and everything in it."""
        if self._lost:
            _end_descendants(self._child.pid)
        self._child.kill_group()  # also where the supervisor has ended, but not what it started
        self._child.kill()
        if self._lost and self._uid is not None:
            _end_user(self._uid)
        shutil.rmtree(self._work, ignore_errors=True)

    def _read(self, limit_s: float) -> dict[str, object]:
        """The next answer. Raises TimeoutError or EOFError: its time is over, or the supervisor is gone or damaged."""
        deadline = time.monotonic() + limit_s
        try:
            (size,) = struct.unpack("<I", self._child.receive(4, deadline))
            answer = json.loads(self._child.receive(size, deadline)) if size <= _MAX_FRAME else None
        except EOFError:
            self._child.ends_within(0.2)  # so that `run` can tell an end from a time-out
            raise
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EOFError
        return answer


def _end_descendants(pid: int) -> None:
    """End what a supervisor should have ended: stop first, so that nothing takes the place of what is killed."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for action in (psutil.Process.suspend, psutil.Process.kill):
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                action(process)


def _end_user(uid: int) -> None:
    """End what a sandbox left behind whose supervisor could not do it: all processes of its own user number."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        left = [process for process in psutil.process_iter() if _user(process) == uid]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _user(process: psutil.Process) -> int:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process.uids().real if alive else -1
    except psutil.Error:
        return -1


def _execution(answer: dict[str, object]) -> Execution:
    return Execution(**{name: answer[name] for name in Execution.__slots__})  # type: ignore[arg-type]
