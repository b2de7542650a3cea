"""A name, a module path or a file becomes a `Task`, or an error that says what was found and what to do.

    string.reverse              a registered task
    reasoning_gym.chain_sum     a dataset of the reasoning_gym package
    my_package.tasks:MyTask     a class (or a function that returns a task) on the import path
    path="my_task.py"           a file that need not be on the import path

`check_task` then plays one record of each split, so that a broken task fails in seconds and by name.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from envs.check import check_task
from envs.task_file import construct, task_from_file
from envs.tasks.reasoning import PREFIX, ReasoningTask, dataset_names
from envs.tasks.strings import OPERATIONS, StringTask
from streamrl.environment import Task
from streamrl.errors import TaskError

__all__ = ["REGISTERED", "check_task", "load_task"]

REGISTERED: dict[str, Callable[..., Task]] = {f"string.{op}": partial(StringTask, op) for op in OPERATIONS}


def load_task(name: str, *, path: str | None = None, options: Mapping[str, Any] | None = None) -> Task:
    """The task that the settings ask for.

    Args:
        name: a registered name, `reasoning_gym.<dataset>`, or `package.module:Class`; unused when `path` is given.
        path: a Python file with the user's own task; see `envs.task_file` for the forms that it may take.
        options: keyword arguments of the task; unknown ones are refused by name.
    Raises:
        TaskError: nothing by that name, an option that it does not have, or an error in the user's code.
    """
    options = dict(options or {})
    if path is not None:
        return task_from_file(path, options)
    if name.startswith(PREFIX):
        return construct(partial(ReasoningTask, name.removeprefix(PREFIX)), options, name)
    if name in REGISTERED:
        return construct(REGISTERED[name], options, name)
    if ":" in name:
        return _from_module(name, options)
    raise TaskError(_unknown(name))


def _from_module(name: str, options: dict[str, Any]) -> Task:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TaskError(
            f"task {name!r}: cannot import {error.name!r}. Install the package, start from the folder that holds it, "
            "or give the file with env.path."
        ) from error
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise TaskError(f"task {name!r}: module {module_name} has no {attribute!r}.{_nearest(attribute, public)}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise TaskError(f"task {name!r} is a {type(factory).__name__}: name a class or a function that returns a task.")
    task = construct(factory, options, name)
    if isinstance(task, Task):
        return task
    raise TaskError(f"task {name!r} returned a {type(task).__name__}, which has no name, num_records, record and env.")


def _unknown(name: str) -> str:
    # The package is only imported for the spelling check of a name that failed already.
    candidates = [*REGISTERED, *(PREFIX + dataset for dataset in dataset_names())]
    return (
        f"Unknown task {name!r}.{_nearest(name, candidates)} Registered: {', '.join(sorted(REGISTERED))}; also "
        "reasoning_gym.<dataset>, package.module:Class, or your own file with env.path=my_task.py."
    )


def _nearest(word: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(word, candidates, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
