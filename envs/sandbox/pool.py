"""Sandboxes that are started before they are needed, each for one program."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from envs.sandbox.detect import find_isolation
from envs.sandbox.isolation import WORDS
from envs.sandbox.limits import Case, Execution, Limits
from envs.sandbox.process import SandboxProcess
from streamrl.errors import TaskError

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
