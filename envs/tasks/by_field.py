"""Several tasks over the same data files: a field of each record names the one that scores it (`env.tasks`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.async_compat import call, suited
from streamrl.environment import ChatMessage, DrivesGeneration, Env, InputText, Record, Task
from streamrl.errors import TaskError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,23}")


class FieldTask:
    """A task whose records belong to one of several.

    Args:
        tasks: by name; all of them read the same records.
        field: of a record, with the name.
    Raises:
        TaskError: a name that is none, or a task with an interaction loop of its own.
    """

    def __init__(self, tasks: Mapping[str, Task], field: str) -> None:
        self._tasks, self._field = tasks, field
        self._records = next(iter(tasks.values()))
        self.name = self._records.name
        resets = []
        for name, task in tasks.items():
            if not NAME.fullmatch(name):
                raise TaskError(
                    f"env.tasks names a task {name!r}: use 1 to 24 of A-Z a-z 0-9 _ - and begin with a letter"
                )
            env = task.env()
            if isinstance(env, DrivesGeneration):
                raise TaskError(f"env.tasks.{name} has an interaction loop of its own: leave it out")
            resets.append(env.reset)
        self._make_env = suited(FieldEnv, *resets)
        for optional in ("stop", "system_prompt"):  # of the whole run, so all must agree
            values = [getattr(task, optional, None) for task in tasks.values()]
            if values[0] is not None and all(value == values[0] for value in values):
                setattr(self, optional, values[0])

    def label(self, record: Record) -> str:
        """The name of the record's task."""
        name = record.get(self._field)
        if name not in self._tasks:
            raise TaskError(
                f"a record has {self._field}={name!r:.40}, and env.tasks has {', '.join(self._tasks)}: name one of them"
            )
        return name

    def num_records(self, split: str) -> int:
        return self._records.num_records(split)

    def record(self, split: str, index: int) -> Record:
        return self._records.record(split, index)

    def target(self, record: Record) -> str | None:
        return self._read("target", record, None)

    def answer(self, record: Record) -> Any:
        return self._read("answer", record, None)

    def answer_forms(self, record: Record) -> Sequence[str]:
        return self._read("answer_forms", record, [])

    def is_no_answer(self, record: Record) -> bool:
        return self._read("is_no_answer", record, False)

    def set_up(self) -> None:
        self._all("set_up")

    def tear_down(self) -> None:
        self._all("tear_down")

    def env(self) -> FieldEnv:
        return self._make_env(self)

    def env_of(self, record: Record) -> Env:
        return self._tasks[self.label(record)].env()

    def _read(self, method: str, record: Record, otherwise: Any) -> Any:
        known = getattr(self._tasks[self.label(record)], method, None)
        return otherwise if known is None else known(record)

    def _all(self, method: str) -> None:
        for task in self._tasks.values():
            if hasattr(task, method):
                getattr(task, method)()


class FieldEnv:
    """The environment of the record's task, which `reset` tells; everything else is that one's own."""

    def __init__(self, task: FieldTask) -> None:
        self._task = task

    async def reset(self, record: Record) -> Sequence[ChatMessage] | InputText:
        self._env = self._task.env_of(record)
        return await call(self._env.reset, record)

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # before `reset`
            raise AttributeError(name)
        return getattr(self._env, name)
