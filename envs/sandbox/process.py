"""One warm sandbox: a supervisor that waits for a program, serves it, and is thrown away."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict

import psutil

from envs.sandbox.isolation import Isolation
from envs.sandbox.limits import Case, Execution, Limits

START_S = 10.0
GRACE_S = 0.4
"""How much longer than its time a case may take before its sandbox is ended from outside."""
_MAX_FRAME = 256 << 20


class _EndedError(Exception):
    """The supervisor is gone, or its time is over."""


class SandboxProcess:
    """Start it from a thread that lives on: the sandbox dies with the thread that started it (PR_SET_PDEATHSIG)."""

    def __init__(self, isolation: Isolation, slot: int, limits: Limits) -> None:
        """`slot` tells apart the sandboxes of this process, from 0 to 255."""
        uid = self._uid = isolation.uid(slot)
        self._work = tempfile.mkdtemp(prefix="streamrl-sandbox-")
        if uid is not None:
            os.chown(self._work, uid, uid)
        self._process = subprocess.Popen(
            isolation.command(self._work, uid, tmp_bytes=limits.file_bytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(self._fd(pipe), False)
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
            self._write(json.dumps(request).encode(), time.monotonic() + min(START_S, total_s))
            for _ in cases:
                case_start = time.monotonic()
                answer = self._read(min(limits.timeout_s + GRACE_S, end - case_start))
                done.append(_execution(answer))
        except _EndedError:
            seconds = time.monotonic() - case_start
            timed_out = self._process.poll() is None
            self._lost = True
            done.append(Execution("timeout" if timed_out else "lost", seconds=seconds))
            self._note_complaint()
        return done

    def close(self) -> None:
        """End the sandbox and everything in it."""
        if self._lost:
            _end_descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if self._lost and self._uid is not None:
            _end_user(self._uid)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def _write(self, data: bytes, deadline: float) -> None:
        try:
            written = write(self._fd(self._process.stdin), struct.pack("<I", len(data)) + data, deadline)
        except BrokenPipeError:
            written = False
        if not written:
            raise _EndedError

    def _read(self, limit_s: float) -> dict[str, object]:
        deadline = time.monotonic() + limit_s
        (size,) = struct.unpack("<I", self._read_exactly(4, deadline))
        if size > _MAX_FRAME:
            raise _EndedError
        try:
            answer = json.loads(self._read_exactly(size, deadline))
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _EndedError
        return answer

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        fd = self._fd(self._process.stdout)
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise _EndedError
            chunk = os.read(fd, size - len(data))
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.2)  # so that `run` can tell an end from a time-out
                raise _EndedError
            data += chunk
        return data

    def _note_complaint(self) -> None:
        if self._process.poll() is not None and self._process.stderr is not None:
            self.complaint = self._process.stderr.read(2000).decode(errors="replace").strip()

    @staticmethod
    def _fd(pipe: object) -> int:
        return pipe.fileno()  # type: ignore[attr-defined]


def write(fd: int, data: bytes, deadline: float) -> bool:
    """Write to a pipe that does not block; False if its reader has not taken all of it in time."""
    view = memoryview(data)
    while view:
        if not select.select([], [fd], [], max(0.0, deadline - time.monotonic()))[1]:
            return False
        view = view[os.write(fd, view) :]
    return True


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
