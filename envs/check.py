"""Play one record of each split, so that a broken task fails in seconds and by name."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envs.task_file import NO_TASK, describe
from streamrl.environment import ChatMessage, HasTarget, Record, Step, Task
from streamrl.errors import TaskError

ROLES = ("system", "user", "assistant", "tool")
PROBE = "probe"
"""An arbitrary completion: every text must be scored, none may crash."""


def check_task(task: Task) -> None:
    """Raise TaskError, with the task's name and what it did wrong, unless one episode of each split goes through.

    Checked: the protocol's methods, that records are JSON and the same when asked for twice, message types and roles,
    that `step` returns a finite `Step` for an arbitrary completion, and that a known right answer earns no less.
    """
    if not isinstance(task, Task):
        raise TaskError(f"got a {type(task).__name__}, {NO_TASK}")
    for split in ("train", "test"):
        where = f"task {task.name!r}, {split} record 0"
        count = _call(where, "num_records", task.num_records, split)
        if not isinstance(count, int) or count < 1:
            raise TaskError(f"task {task.name!r}: num_records({split!r}) must be a positive integer, got {count!r}.")
        record = _checked_record(where, task, split)
        probe = _play(where, task, record, PROBE)
        if isinstance(task, HasTarget):
            target = _call(where, "target", task.target, record)
            if not isinstance(target, str):
                raise TaskError(f"{where}: target must return a string, got {target!r}.")
            best = _play(where, task, record, target)
            if best.reward < probe.reward:
                raise TaskError(
                    f"{where}: its own target {target!r} earns {best.reward}, less than the text {PROBE!r} with "
                    f"{probe.reward}: target and reward disagree."
                )


def _checked_record(where: str, task: Task, split: str) -> Record:
    record = _call(where, "record", task.record, split, 0)
    try:
        first = json.dumps(record, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where} is not JSON ({error}): use strings, numbers, lists and dictionaries only.") from error
    again = _call(where, "record", task.record, split, 0)
    if json.dumps(again, sort_keys=True) != first:
        raise TaskError(f"{where} changes when asked for twice: derive its random draws from (split, index) alone.")
    return record


def _play(where: str, task: Task, record: Record, completion: str) -> Step:
    env = _call(where, "env", task.env)
    _check_messages(where, "reset", _call(where, "reset", env.reset, record), at_least=1)
    step = _call(where, "step", env.step, completion)
    if not isinstance(step, Step):
        raise TaskError(f"{where}: step must return a Step, got {step!r}.")
    numbers = {"reward": step.reward, "score": step.score, **step.parts}
    for key, value in numbers.items():
        if value is None and key == "score":
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TaskError(f"{where}: {key} must be a finite number, got {value!r} for the completion {completion!r}.")
    _check_messages(where, "step", step.messages, at_least=0 if step.done else 1)
    return step


def _check_messages(where: str, source: str, messages: Any, *, at_least: int) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) < at_least:
        raise TaskError(f"{where}: {source} must give a list of at least {at_least} ChatMessage, got {messages!r}.")
    for message in messages:
        if not isinstance(message, ChatMessage) or not isinstance(message.content, str):
            raise TaskError(f"{where}: {source} gave {message!r} where ChatMessage(role, content) belongs.")
        if message.role not in ROLES:
            raise TaskError(f"{where}: {source} gave the role {message.role!r}; allowed are {', '.join(ROLES)}.")


def _call(where: str, method: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain or an async method; its exception becomes a TaskError with the user's own line."""
    try:
        result = function(*args)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
    except Exception as error:
        raise TaskError(f"{where}: {method} raised {describe(error)}") from error
    return result


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
