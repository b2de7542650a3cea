"""Processes that grade answers of a model: a JSON line in, one out, see `envs.sandbox.confined.serve`."""

from __future__ import annotations

import json
import os
import queue
import time
from typing import Any

from envs.sandbox.confined import PREPARE_S
from streamrl.config.addresses import environment_without_keys
from streamrl.config.schema import RewardConfig
from streamrl.errors import TaskError
from streamrl.parent_watch import program
from streamrl.processes import Child

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
    """Pool of up to `num_workers` processes of `python -m module limit_s`, started when needed; threads may share it.

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
                worker.kill()
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
                worker.kill()


class _Worker(Child):
    def __init__(self, module: str, limit_s: float) -> None:
        super().__init__(
            [*program(module), str(limit_s)], environment=environment_without_keys() | {"OMP_NUM_THREADS": "1"},
            parent_watch=False, answers=True, keep_errors=True,
        )
        try:
            self._line(time.monotonic() + START_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, question: Any, limit_s: float) -> Any:
        line = self._line(time.monotonic() + limit_s, json.dumps(question).encode() + b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise TaskError(f"a reward printed a line that is not an answer, remove the print: {line[:200]!r}")
        return answer

    def _line(self, deadline: float, question: bytes = b"") -> bytes:
        """Return the worker's answer to a question. Raises TaskError if the worker ends or takes too long."""
        try:
            self.send(question, deadline)
            return self.receive_line(deadline)
        except TimeoutError:
            raise TaskError("a reward's worker did not answer in time: look at this machine's load.") from None
        except EOFError:
            status, words = self.how_it_ended(END_S)
            raise TaskError(f"a reward's worker ended with status {status}, see its last words: {words}") from None
