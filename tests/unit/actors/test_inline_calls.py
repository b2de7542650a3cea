"""Quick methods are called on the event loop, and a call that hangs there is ended all the same."""

import asyncio
import math
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from actors import EXIT_ENGINE_HUNG
from actors.env_calls import executor
from actors.env_calls.executor import EnvExecutor, HungCallError
from actors.env_calls.inline import NUM_QUICK, QUICK_S, SLOW_S, InlineCalls
from streamrl.environment import SingleTurnTask
from streamrl.errors import TaskError

LIMIT_S = 0.2


@pytest.fixture(autouse=True)
def free_alarm():
    """The test runner limits a test's time by the same signal, which then belongs to it."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left_s)


class Probe:
    """An environment's method: it says where it ran, and does what it is given."""

    may_block = False

    def step(self, action):
        if callable(action):
            action()
        return threading.current_thread() is threading.main_thread()


def proven(env=None, num=NUM_QUICK):
    """An executor for which the environment's `step` has been quick so often."""
    env, inline = env or Probe(), InlineCalls()
    for _ in range(num):
        inline.note(env.step, 1e-5)
    return env, EnvExecutor(2, inline)


async def test_the_first_calls_have_a_thread_and_later_ones_none():
    env, calls = Probe(), EnvExecutor(2, InlineCalls())
    on_loop = [await calls.run(env.step, "", 10.0) for _ in range(NUM_QUICK)]
    assert not any(on_loop)
    while not on_loop[-1]:  # on a busy machine a few are not quick
        on_loop.append(await calls.run(env.step, "", 10.0))
    assert calls.num_answered == {"step": len(on_loop)}
    assert await calls.run(Probe().step, "", 10.0)  # another episode of the same environment


@pytest.mark.parametrize("why", ["few", "often too long", "once hung", "may block", "no inline calls", "alarm in use"])
async def test_a_method_that_is_not_known_to_be_quick_has_a_thread(why):
    env, calls = proven(num=NUM_QUICK - 1 if why == "few" else NUM_QUICK)
    inline = calls._inline
    if why == "often too long":
        inline.note(env.step, SLOW_S / 2)
    elif why == "once hung":
        for seconds in (math.inf, *[1e-5] * 10_000):
            inline.note(env.step, seconds)
    elif why == "may block":
        env.may_block = True
    elif why == "no inline calls":
        calls = EnvExecutor(2)
    elif why == "alarm in use":
        signal.signal(signal.SIGALRM, lambda number, frame: None)
    assert not await calls.run(env.step, "", 10.0)
    if why == "may block":
        env.may_block = False
        assert await calls.run(env.step, "", 10.0)


@pytest.mark.parametrize("slow_s", [[SLOW_S], [SLOW_S, 3 * SLOW_S], [4 * SLOW_S, SLOW_S, SLOW_S]])
async def test_slow_calls_ask_for_a_quick_one_for_each_of_their_milliseconds(slow_s):
    env, calls = proven()
    inline, needed = calls._inline, NUM_QUICK + round(sum(slow_s) / QUICK_S)
    assert inline.ready(env.step)
    for seconds in slow_s:
        inline.note(env.step, seconds)
        assert not inline.ready(env.step)
        inline.note(env.step, 1e-5)
    for _ in range(needed - 2):
        inline.note(env.step, 1e-5)
    assert not inline.ready(env.step)
    for _ in range(2):  # rounding takes one
        inline.note(env.step, 1e-5)
    assert inline.ready(env.step) and await calls.run(env.step, "", 10.0)


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="counts the waits of a thread")
@pytest.mark.parametrize("waits", [False, True])
def test_time_that_other_processes_took_does_not_count_as_the_calls_own(monkeypatch, waits):
    clock = [0.0]
    monkeypatch.setattr(executor.time, "perf_counter", lambda: clock[0])

    def step(action: str) -> str:
        clock[0] += 2 * SLOW_S  # as if another process had the core
        if waits:
            time.sleep(0.001)
        return action

    result, error, seconds, _ = executor._outcome(step, "a")
    assert (result, error) == ("a", None)
    assert seconds == pytest.approx(2 * SLOW_S) if waits else seconds < SLOW_S


def test_a_task_says_for_its_environment_that_it_may_block():
    class Remote(SingleTurnTask):
        may_block = True

    assert Remote().env().may_block and not SingleTurnTask().env().may_block


def _busy():
    while True:
        pass


def _catches_everything():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass


@pytest.mark.parametrize("hang", [_busy, _catches_everything, threading.Event().wait])
async def test_an_inline_call_that_hangs_is_ended_and_has_a_thread_from_then_on(hang):
    env, calls = proven()
    with pytest.raises(HungCallError, match="step ran for more than env.step_timeout_s=0.2"):
        await calls.run(env.step, hang, LIMIT_S)
    assert calls.num_hung_calls == 1 and calls.num_abandoned == 0 and not calls.num_answered["step"]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    assert not await calls.run(env.step, "", 10.0)


async def test_a_limit_beyond_every_timer_is_no_error():
    env, calls = proven()
    assert await calls.run(env.step, "", 1e12)


async def test_a_call_leaves_no_timer_behind_and_its_error_reaches_the_caller():
    def fails():
        raise ValueError("of the environment")

    def exits():
        raise SystemExit(3)

    env, calls = proven()
    assert await calls.run(env.step, "", 10.0)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    for action, error in ((fails, ValueError), (exits, TaskError)):
        with pytest.raises(error):
            await calls.run(env.step, action, 10.0)
    assert await calls.run(env.step, lambda: asyncio.run(asyncio.sleep(0)), 10.0)  # a loop of its own
    assert asyncio.get_running_loop() is not None


async def test_inline_calls_count_against_the_number_of_threads():
    env, inline = Probe(), InlineCalls()
    for _ in range(NUM_QUICK):
        inline.note(env.step, 1e-5)
    calls, gate = EnvExecutor(1, inline), threading.Event()
    other = asyncio.create_task(calls.run(lambda _: gate.wait(30), None, 60.0))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(calls.run(env.step, "", 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()  # it would overlap
    gate.set()
    assert await other and not await waiting


def test_what_no_signal_interrupts_ends_the_process():
    script = """
import asyncio, signal, time
from actors.env_calls.inline import InlineCalls

def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)

async def work():
    calls = InlineCalls(grace_s=0.1)
    for _ in range(64):
        calls.note(deaf, 1e-5)
    assert calls.ready(deaf)
    calls.run(deaf, 0.1, "Remote.step")

asyncio.run(work())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)

    assert done.returncode == EXIT_ENGINE_HUNG
    assert "Remote.step does not end, and no signal interrupts it" in done.stderr
