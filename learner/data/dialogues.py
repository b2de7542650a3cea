"""Prompts and right answers for a tiny model's warm start; without torch, so that the preflight can read them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from streamrl.environment import ChatMessage, HasTarget, HasTargetTurns, InputText, Record, Task
from streamrl.errors import TaskError

Dialogue = tuple[str, ...]
"""A prompt, its right answer, and what follows in tasks of several turns: environment, model, ..."""
REAL_MODEL = "use policy.model_path=... (`make smollm2` gets a small one)"


def task_dialogues(task: Task, num_dialogues: int, *, needs_target: bool, limit_s: float = inf) -> list[Dialogue]:
    """Dialogues of the last training records; answers are empty where the task knows none and none are needed.

    Raises TaskError: the task knows no answers and some are needed, or it does not open with one user message.
    """
    knows_targets = isinstance(task, HasTarget | HasTargetTurns)
    if needs_target and not knows_targets:
        raise _no_target(task, "give it a method target(record) -> str")
    env, size, dialogues, until = task.env(), task.num_records("train"), [], time.monotonic() + limit_s
    indices: Sequence[int] = range(size - 1, max(-1, size - 1 - num_dialogues), -1)
    if size <= num_dialogues:  # a file may be sorted: what is held out of it must be like the rest
        indices = random.Random(0).sample(indices, size)
    with asyncio.Runner() as runner:
        for index in indices:
            try:
                record = task.record("train", index)
            except TaskError:
                continue  # a bad record of a data file: it is counted when it is drawn
            prompt = _opening(task, env, record, runner)
            turns = _target_turns(task, record) if knows_targets else [""]
            if turns is None and needs_target:
                raise _no_target(task, "name the field of the answer (data.answer_key)")
            dialogues.append((prompt, *(turns or [""])))
            if time.monotonic() > until:
                break
        closing = env.close() if callable(getattr(env, "close", None)) else None
        if closing is not None:
            runner.run(_awaited(closing))
    return dialogues


def _opening(task: Task, env: Any, record: Record, runner: asyncio.Runner) -> str:
    """The one user message that the episode opens with. Raises TaskError: it opens in another way."""
    reset = getattr(env, "reset", None)
    messages = None if reset is None else reset(record)
    if hasattr(messages, "__await__"):
        messages = runner.run(_awaited(messages))
    found = _in_the_way(task, env, messages)
    if found is None:
        return messages[0].content
    why, remedy = found
    raise TaskError(
        f"a tiny model reads one user message, and task {task.name!r} gives it something else: {why}. To go on, "
        f"{REAL_MODEL}, or {remedy}."
    )


def _in_the_way(task: Task, env: Any, messages: Any) -> tuple[str, str] | None:
    """The obstacle of a prompt that is not one user message, with the remedy; None if it is just that."""
    if getattr(task, "tool_prompt", "") and getattr(env, "tools", ()):
        return "env.tools describes its tools in a system message", "leave env.tools out"
    if messages is None:
        return "it generates by itself, in a loop of its own", "take another task"
    if isinstance(messages, InputText):
        return "it opens with the model's whole input as a text", "take another task"
    roles = [message.role if isinstance(message, ChatMessage) else "?" for message in messages]
    if roles == ["user"]:
        return None
    remedy = "drop the system message" if roles == ["system", "user"] else "open with one user message"
    return f"its prompt has the messages {', '.join(roles)}", remedy


async def _awaited(value: Any) -> Any:
    return await value


def _target_turns(task: Task, record: Record) -> Sequence[str] | None:
    if isinstance(task, HasTargetTurns):
        return task.target_turns(record)
    assert isinstance(task, HasTarget)
    target = task.target(record)
    return None if target is None else [target]


def _no_target(task: Task, remedy: str) -> TaskError:
    return TaskError(
        f"task {task.name!r} knows no right answers: {remedy}, or start from random weights "
        "(policy.tiny.num_warm_start_steps=0) or from a trained checkpoint (policy.model_path)."
    )
