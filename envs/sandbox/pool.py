"""Sandboxes that are started before they are needed, each for one program."""

from __future__ import annotations

import functools
import os
import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from envs.sandbox.isolation import WORDS, Case, Execution, Isolation, Limits, base_python
from envs.sandbox.process import SandboxProcess
from streamrl.errors import TaskError

LEVELS = ("auto", "1", "2")
_TRIAL = "import collections, json, math, random, re\nopen('file', 'w').write('x')\nprint(6 * 7)"


@functools.cache
def find_isolation(wanted: str = "auto") -> Isolation:
    """The best isolation that works here; each candidate runs a small program before it is believed.

    Args:
        wanted: one of LEVELS; "auto" is level 2 where it works, else level 1.

    Raises:
        TaskError: the wanted level does not work here; says why and what to install.
    """
    if wanted not in LEVELS:
        raise TaskError(f"sandbox level {wanted!r}: give one of {', '.join(LEVELS)}.")
    reasons: list[str] = []
    for candidate in _candidates():
        if wanted in ("auto", str(candidate.level)):
            reason = why_not(candidate)
            if reason is None:
                return candidate
            reasons.append(reason)
    raise TaskError(
        f"Sandbox level {wanted} does not work here: {'; '.join(reasons) or 'bwrap is not installed'}. "
        "Level 2 needs the package bubblewrap, and a kernel that lets it make namespaces; level 1 protects less."
    )


def _candidates() -> Iterator[Isolation]:
    root = os.getuid() == 0
    pythons = [python for python in dict.fromkeys((base_python(), "/usr/bin/python3")) if os.access(python, os.X_OK)]
    bubblewrap = shutil.which("bwrap")
    for made_by in (None,) if bubblewrap is None else (bubblewrap, None):
        for drops_root in (True, False) if root else (False,):
            for python in pythons:
                yield Isolation(python, drops_root, made_by)


def why_not(isolation: Isolation) -> str | None:
    """None if a program runs in it, else the reason why not."""
    try:
        process = SandboxProcess(isolation, slot=255, limits=Limits())
    except OSError as error:
        return str(error)
    try:
        outcome = process.run(_TRIAL, [Case()], Limits(), total_s=10.0)[0]
        return None if outcome.stdout == "42\n" else f"level {isolation.level}: {process.complaint or outcome.stderr}"
    finally:
        process.close()


LEVELS_IN_USE: set[int] = set()
"""Of the pools that this process has made."""
_END = -1
"""In place of a slot: nothing comes after it."""


class SandboxPool:
    """Runs programs, at most `num_workers` at once; callers of `run` wait for their turn. Threads may share a pool.

    Args:
        level: "auto", "1" or "2" (envs/sandbox/isolation.py); `description` says which one it is.
        num_workers: sandboxes at once; None is one for each core. As many wait ready.
        limits: of each execution.

    Raises:
        TaskError: the level does not work on this machine.
    """

    def __init__(self, level: str = "auto", num_workers: int | None = None, limits: Limits | None = None) -> None:
        self._isolation = find_isolation(level)
        self.limits = limits or Limits()
        self.level = self._isolation.level
        self.description = WORDS[self.level]
        LEVELS_IN_USE.add(self.level)
        size = num_workers or os.cpu_count() or 1
        if not 1 <= size <= 128:
            raise TaskError(f"a sandbox pool has 1 to 128 workers, got {size}.")
        self._ready: queue.Queue[tuple[int, SandboxProcess | Exception]] = queue.Queue()
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(2 * size):
            self._free.put(slot)
        self._running = threading.BoundedSemaphore(size)
        self._closed = False
        # Sandboxes die with the thread that started them, and callers' threads may end: one thread starts them all.
        self._starter = threading.Thread(target=self._start_all, name="sandbox-starter", daemon=True)
        self._starter.start()

    def run(
        self, program: str, cases: Sequence[Case] = (Case(),), total_s: float = 600.0,
        case_timeout_s: float | None = None,
    ) -> list[Execution]:
        """Run a Python program once for each case, each in a directory of its own, all in one fresh sandbox.

        Returns: one execution for each case; fewer if the program ended its sandbox or `total_s` passed, and then
            the last one says so ("lost", "timeout").
        """
        with self._running:
            if self._closed:
                raise TaskError("this sandbox pool is closed.")
            slot, process = self._ready.get()
            if isinstance(process, Exception):
                if slot == _END:  # for the next one that waits
                    self._ready.put((slot, process))
                else:
                    self._free.put(slot)
                raise TaskError(f"no sandbox could be started: {process}.") from process
            try:
                limits = self.limits if case_timeout_s is None else replace(self.limits, timeout_s=case_timeout_s)
                return process.run(program, cases, limits, total_s)
            finally:
                process.close()
                self._free.put(slot)

    def close(self) -> None:
        self._closed = True
        self._free.put(None)
        self._starter.join()
        while (ready := self._ready.get())[0] != _END:
            if isinstance(ready[1], SandboxProcess):
                ready[1].close()
        self._ready.put(ready)

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_all(self) -> None:
        while (slot := self._free.get()) is not None and not self._closed:
            try:
                self._ready.put((slot, SandboxProcess(self._isolation, slot, self.limits)))
            except Exception as error:  # as a machine that starts no thread: who waits here must hear it
                self._ready.put((slot, error))
        self._ready.put((_END, TaskError("this sandbox pool is closed")))
