"""Play one record of each split, so that a broken task fails in seconds and by name."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from envs.task_file import NO_TASK
from streamrl.environment import (
    MAX_REWARD,
    ROLES,
    ChatMessage,
    DrivesGeneration,
    Env,
    HasLastStep,
    HasSetUp,
    HasTarget,
    InputText,
    KnowsAnswer,
    Record,
    Step,
    Task,
)
from streamrl.errors import TaskError, describe

PROBE = "probe"
"""An arbitrary completion: every text must be scored, none may crash."""
NO_SIGNALS = (
    "Actors run plain environments in threads, where signal.alarm cannot work: turn that time limit off (math_verify: "
    "parsing_timeout=None and timeout_seconds=None); env.step_timeout_s limits every call."
)
KINDS = {int: "a number", float: "a number", bool: "a truth value", str: "a text", list: "a list", dict: "an object"}
NUM_ANSWERS, ANSWERS_S = 16, 5.0
"""Records whose own answers are scored, spread over the train split, and after how long no further one is."""
SLOW_S = 10.0
"""After so long a call that still runs is reported."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """The time limit of every call (env.step_timeout_s), and the callback for one that is slow."""

    limit_s: float
    notify: Callable[[str], None]


def check_task(task: Task, *, limit_s: float = 30.0, notify: Callable[[str], None] = lambda _: None) -> None:
    """Raise TaskError, with the task's name and what it did wrong, unless one episode of each split goes through.

    Checked: the protocol's methods, that records are JSON and the same when asked for twice, message types and roles,
    that `step` returns a finite `Step` for an arbitrary completion, and that a known right answer earns no less.
    Environments are played as in an actor: plain ones in a thread, each call within `limit_s` (env.step_timeout_s).

    Args:
        notify: called with a line about a call that has been running for 10 s.
    """
    limits = _Limits(limit_s, notify)
    if not isinstance(task, Task):
        raise TaskError(f"got a {type(task).__name__}, {NO_TASK}")
    for split in ("train", "test"):
        where = f"task {task.name!r}, {split} record 0"
        count = _call(where, "num_records", task.num_records, split)
        if not isinstance(count, int) or count < 1:
            raise TaskError(f"task {task.name!r}: num_records({split!r}) must be a positive integer, got {count!r}.")
        record = _checked_record(where, task, split)
        if isinstance(_call(where, "env", task.env), DrivesGeneration):
            continue  # it needs an engine: the first episodes show what is wrong with it
        if isinstance(task, HasSetUp):
            _closed(where, _reset(where, task, record, limits), limits)
            continue
        probe = _play(where, task, record, PROBE, limits)
        if isinstance(task, HasTarget):
            target = _call(where, "target", task.target, record)
            if target is None:
                continue
            if not isinstance(target, str):
                raise TaskError(f"{where}: target must return a string, got {target!r}.")
            best = _play(where, task, record, target, limits)
            if best.reward < probe.reward:
                raise TaskError(
                    f"{where}: its own target {target!r} earns {best.reward}, less than the text {PROBE!r} with "
                    f"{probe.reward}: target and reward disagree."
                )
            if split == "train" and isinstance(task, KnowsAnswer):
                _tell_unpaid(task, count, best, probe, limits)


def _paid(step: Step, probe: Step) -> bool:
    """Whether an answer earns something, or more than an arbitrary text; even if the episode goes on after it."""
    return step.reward > min(0.0, probe.reward) or (step.score or 0.0) > 0 or not step.done


def _tell_unpaid(task: Task, count: int, best: Step, probe: Step, limits: _Limits) -> None:
    """Notify if own answers of records earn nothing in any form; `best` is what the first one earns as `target`."""
    assert isinstance(task, KnowsAnswer)
    end, num_seen, unpaid = time.monotonic() + ANSWERS_S, 0, list[tuple[int, Record]]()
    for index in sorted({place * (count - 1) // (NUM_ANSWERS - 1) for place in range(NUM_ANSWERS)}):
        if index > 0 and time.monotonic() > end:
            break
        where = f"task {task.name!r}, train record {index}"
        try:
            record = _call(where, "record", task.record, "train", index)
            forms = list(task.answer_forms(record))
            known = [best] if index == 0 else []  # the first form is the target's
            steps = chain(known, (_play(where, task, record, form, limits) for form in forms[len(known) :]))
            if forms and (_is_no_answer(task, record) or not any(_paid(step, probe) for step in steps)):
                unpaid.append((index, record))
            num_seen += 1
        except TaskError:
            continue  # of a form that no reward has to know; else it costs that record only
    if unpaid:
        index, record = unpaid[0]
        which = "the first record" if index == 0 else f"record {index}"
        others = f" (nor do {len(unpaid) - 1} more of {num_seen} records looked at)" if len(unpaid) > 1 else ""
        limits.notify(f"the right answer of {which} {_unpaid(task, record)}{others}")


def _is_no_answer(task: KnowsAnswer, record: Record) -> bool:
    looks = getattr(task, "is_no_answer", None)
    return looks is not None and looks(record)


def _unpaid(task: KnowsAnswer, record: Record) -> str:
    answer = task.answer(record)
    if _is_no_answer(task, record):
        return (f"({answer!r:.40}, {len(answer)} characters) is a whole text, not an answer: end it with "
                "\\boxed{...} or #### and the answer, or name another field with data.answer_key")
    kind = KINDS.get(type(answer), f"a {type(answer).__name__}")
    remedy = "look at how the reward compares it" if isinstance(answer, str) else "compare texts, or use str(answer)"
    return f"({answer!r:.40}, {kind}) earns nothing: {remedy}"


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


def _reset(where: str, task: Task, record: Record, limits: _Limits) -> Env:
    env = _call(where, "env", task.env)
    messages = _call_as_actor(where, "reset", env.reset, record, limits)
    if not isinstance(messages, InputText):
        _check_messages(where, "reset", messages, at_least=1)
    return env


def _play(where: str, task: Task, record: Record, completion: str, limits: _Limits) -> Step:
    env = _reset(where, task, record, limits)
    step = _checked_step(where, "step", _call_as_actor(where, "step", env.step, completion, limits), completion)
    if not step.done and isinstance(env, HasLastStep):
        last = _call_as_actor(where, "last_step", env.last_step, completion, limits)
        step = _checked_step(where, "last_step", last, completion)
    _closed(where, env, limits)
    return step


def _closed(where: str, env: Env, limits: _Limits) -> None:
    close = getattr(env, "close", None)
    if inspect.iscoroutinefunction(close):
        async def closing(_: object) -> None:
            await close()

        _call_as_actor(where, "close", closing, None, limits)
    elif callable(close):
        _call_as_actor(where, "close", lambda _: close(), None, limits)


def _checked_step(where: str, method: str, step: Any, completion: str) -> Step:
    if not isinstance(step, Step):
        raise TaskError(f"{where}: {method} must return a Step, got {step!r}.")
    numbers = {"reward": step.reward, "score": step.score, **step.parts}
    for key, value in numbers.items():
        if value is None and key == "score":
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TaskError(f"{where}: {key} must be a finite number, got {value!r} for the completion {completion!r}.")
        if abs(value) > MAX_REWARD:
            raise TaskError(f"{where}: {key} {value:g} is beyond {MAX_REWARD:g} and taken for a mistake: scale it.")
    if step.context is not None and not isinstance(step.context, InputText):
        _check_messages(where, f"{method}, context,", step.context, at_least=1)
    goes_on = method == "step" and not step.done and step.text is None and step.context is None
    _check_messages(where, method, step.messages, at_least=1 if goes_on else 0)
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
    """Call a method; its exception becomes a TaskError with the user's own line."""
    try:
        return function(*args)
    except TaskError:
        raise  # it says itself what is wrong, and where
    except Exception as error:
        raise _raised(where, method, error) from error


def _call_as_actor(where: str, method: str, function: Callable[[Any], Any], argument: object, limits: _Limits) -> Any:
    """Call a method as an actor would: an async one on a loop, a plain one in a thread, both with a limit."""
    told = f"{where}: {method} has been running for {SLOW_S:g} s; the limit is env.step_timeout_s={limits.limit_s:g}."
    watch = threading.Timer(SLOW_S, limits.notify, (told,))
    watch.daemon = True
    watch.start()
    try:
        if inspect.iscoroutinefunction(function):
            return _call(where, method, lambda: asyncio.run(asyncio.wait_for(function(argument), limits.limit_s)))
        return _call_in_thread(where, method, function, argument, limits.limit_s)
    finally:
        watch.cancel()


def _call_in_thread(where: str, method: str, function: Callable[[Any], Any], argument: object, limit_s: float) -> Any:
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function(argument))
        except BaseException as error:  # also SystemExit, which must not pass for a call that hangs
            failure.append(error)

    thread = threading.Thread(target=call, name="env", daemon=True)
    with _alarms_outside_main_thread() as alarms:
        thread.start()
        thread.join(limit_s)
    if failure:
        raise _raised(where, method, failure[0]) from failure[0]
    if not outcome:
        raise TaskError(
            f"{where}: {method} ran for more than env.step_timeout_s={limit_s:g}: fix what it waits for, or raise the "
            "limit."
        )
    if alarms:
        raise TaskError(f"{where}: {method} uses signal.alarm and hides that it failed.\n{NO_SIGNALS}")
    return outcome[0]


@contextmanager
def _alarms_outside_main_thread() -> Iterator[list[str]]:
    """Names of threads that ask for SIGALRM inside: Python refuses it to them, and a reward may catch that error."""
    asked: list[str] = []
    original = signal.signal

    def watched(number: int, handler: Any) -> Any:
        if number == signal.SIGALRM and threading.current_thread() is not threading.main_thread():
            asked.append(threading.current_thread().name)
        return original(number, handler)

    signal.signal = watched  # type: ignore[assignment]
    try:
        yield asked
    finally:
        signal.signal = original


def _raised(where: str, method: str, error: BaseException) -> TaskError:
    if isinstance(error, TaskError):
        return TaskError(f"{where}: {error}")
    text = f"{where}: {method} raised {describe(error)}"
    return TaskError(f"{text}\n{NO_SIGNALS}" if needs_signals(error) else text)


def needs_signals(error: BaseException) -> bool:
    """Whether a call failed because it asked for a signal in a thread."""
    return isinstance(error, ValueError) and "signal" in str(error)
