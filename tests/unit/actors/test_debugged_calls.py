"""Calls of an environment that somebody debugs, without a person."""

from __future__ import annotations

import asyncio
import threading
from bdb import BdbQuit
from types import SimpleNamespace

import pytest

from actors.env_calls import debugger
from actors.env_calls.debugger import DebuggedCalls, PatientLoop
from actors.env_calls.executor import EnvExecutor
from streamrl.errors import TaskError

NO_TIME_S = 1e-9


def test_every_call_is_made_in_the_main_thread_from_the_first_on_and_has_no_time_limit():
    def step(action):
        asyncio.run(asyncio.sleep(0))  # as in a thread, it may run a loop of its own
        return threading.current_thread() is threading.main_thread()

    executor = EnvExecutor(1, DebuggedCalls(lambda: None))
    try:
        assert asyncio.run(executor.run(step, "x", NO_TIME_S)) is True
        assert executor.num_hung_calls == 0
    finally:
        executor.close()


def failure(cause: Exception) -> TaskError:
    try:
        try:
            raise cause
        except Exception as error:
            raise TaskError("the task failed") from error
    except TaskError as error:
        return error


@pytest.mark.parametrize("quits", [False, True])
def test_what_a_reward_raised_is_looked_at_once_and_quitting_ends_the_run(monkeypatch, quits):
    looked_at: list[BaseException] = []
    ended: list[bool] = []
    monkeypatch.setattr(debugger, "_looked_at", lambda error: looked_at.append(error) or quits)
    calls, cause = DebuggedCalls(lambda: ended.append(True)), ValueError("of the user")

    error = failure(cause)
    for _ in range(3):  # members of a group whose one call failed
        calls.failed(error)

    assert looked_at == [cause] and ended == [True] * quits


def test_leaving_the_debugger_is_no_failure_to_look_at(monkeypatch):
    ended: list[bool] = []
    monkeypatch.setattr(debugger, "_looked_at", lambda error: pytest.fail("it was left"))
    DebuggedCalls(lambda: ended.append(True)).failed(failure(BdbQuit()))
    assert ended == [True]


def test_time_stands_still_for_the_loop_while_one_of_its_calls_stands_in_a_debugger(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(debugger, "time", SimpleNamespace(monotonic=lambda: now[0]))
    loop = PatientLoop()
    try:
        began = loop.time()
        now[0] += 0.5
        assert loop.time() - began == 0.5
        now[0] += 3600.0
        assert loop.time() - began == 0.5
        now[0] += 0.25
        assert loop.time() - began == 0.75
    finally:
        loop.close()
