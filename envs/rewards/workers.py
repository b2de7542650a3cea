"""Processes that grade answers of a model: a JSON line in, one out, see `envs.sandbox.confined.serve`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from typing import Any

from envs.sandbox.confined import PREPARE_S
from envs.sandbox.process import write
from streamrl.config.addresses import environment_without_keys
from streamrl.config.schema import RewardConfig
from streamrl.errors import TaskError

START_S = 60.0
GRACE_S = 10.0
"""How much longer than a grader may take its worker is waited for: the worker ends the grader, not itself."""
END_S = 5.0
MAX_WORKERS = 8
"""What reward.num_workers is at most where it is not set: many actors may share a machine."""


def num_workers(settings: RewardConfig) -> int:
    """Processes of this actor for rewards."""
    return settings.num_workers or min(MAX_WORKERS, os.cpu_count() or 1)


class GraderError(Exception):
    """The grader raised on this answer, took longer than its limit, or ended its process; says which."""


class WorkerPool:
    """At most `num_workers` processes of `python -m module limit_s`, started when needed. Threads may share it.

    Raises (from `ask`):
        GraderError: this answer cannot be graded.
        TaskError: it is not the answer's fault: the worker ended, could not start, or could not prepare the question.
    """

    def __init__(self, module: str, num_workers: int, limit_s: float) -> None:
        self._module, self._limit_s = module, limit_s
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)

    def ask(self, question: Any) -> Any:
        """The value that the next free worker finds; questions and values are JSON-serializable."""
        worker = self._places.get()
        try:
            if worker is None:
                worker = _Worker(self._module, self._limit_s)
            answer = worker.ask(question, PREPARE_S + self._limit_s + GRACE_S)
        except BaseException:
            if worker is not None:
                worker.close()
                worker = None
            raise
        finally:
            self._places.put(worker)
        if "failed" in answer:
            raise GraderError(answer["failed"])
        if "broken" in answer:
            raise TaskError(answer["broken"])
        return answer["value"]

    def start(self) -> None:
        """Start one worker, so that the first question need not wait for it. Raises TaskError if it cannot."""
        worker = self._places.get()
        try:
            worker = worker or _Worker(self._module, self._limit_s)
        finally:
            self._places.put(worker)

    def close(self) -> None:
        """End the workers that are idle; busy ones end with their answer, or with this process."""
        while not self._places.empty():
            worker = self._places.get()
            if worker is not None:
                worker.close()


class _Worker:
    def __init__(self, module: str, limit_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(limit_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env=environment_without_keys() | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the actor, not for them
        )  # fmt: skip
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._buffer = b""
        self._errors = b""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        try:
            self._line(time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise

    def ask(self, question: Any, limit_s: float) -> Any:
        assert self._process.stdin is not None
        deadline = time.monotonic() + limit_s
        try:
            if not write(self._process.stdin.fileno(), json.dumps(question).encode() + b"\n", deadline):
                raise self._late()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._line(deadline)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise TaskError(f"a worker of a reward wrote a line that is no answer, see what prints it: {line[:200]!r}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise self._late()
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise self._ended()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = (self._errors + line)[-2000:]

    @staticmethod
    def _late() -> TaskError:
        return TaskError("a reward's worker did not answer in time: look at this machine's load.")

    def _ended(self) -> TaskError:
        status = end(self._process)
        self._reader.join(1.0)
        words = self._errors.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        return TaskError(f"a worker process of a reward ended with status {status}: {words[0]}")


def end(process: subprocess.Popen[Any]) -> int:
    """The status of a process whose output has ended, which should be over at once and is killed if it lives on."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
