"""Adapters between sync and async user functions.

Environments are written once, as async ones, and made plain where all the functions that they call are. An actor runs
plain environments in threads that it watches: a plain function that hangs is counted and given up there.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

METHODS = ("reset", "step", "last_step", "cut_step", "step_group", "score_group", "__call__")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await; also for objects with `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of `function(*args, **options)`, awaited if it is async."""
    return await function(*args, **options) if is_async(function) else function(*args, **options)


def suited(kind: type, *functions: Callable[..., Any]) -> Any:
    """The class of environments or rewards as it is if any of these functions is async, else with plain methods."""
    return kind if any(is_async(function) for function in functions) else _plain(kind)


@functools.cache
def _plain(kind: type) -> type:
    found = {name: getattr(kind, name, None) for name in METHODS}
    plain = {name: _at_once(method) for name, method in found.items() if inspect.iscoroutinefunction(method)}
    return type(kind.__name__, (kind,), plain)


def alike(*functions: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The same functions; where one is async, plain ones run in threads: they would hold up the actor's loop."""
    if not any(is_async(function) for function in functions):
        return list(functions)
    return [function if is_async(function) else functools.partial(_in_thread, function) for function in functions]


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


def _at_once(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any) -> Any:
        coroutine = method(*args)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise RuntimeError(f"{method.__qualname__} waits although all the functions that it calls are plain")

    return run
