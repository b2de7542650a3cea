"""User code may be slow, hang or raise anything; it costs its own member, at the time that it took itself."""

import asyncio
import threading
import time

import pytest

from actors.env_calls.executor import MAX_ABANDONED, EnvExecutor, HungCallError, where
from streamrl.environment import SingleTurnTask
from streamrl.errors import EngineError, TaskError
from tests.kit.loops import DEADLINE_S, jump, jumping, run, until

LIMIT_S = 100.0


class Gates:
    """Calls that stand still until the test opens their gate; all gates open at the end."""

    def __init__(self) -> None:
        self.running = 0
        self._most = 0
        self._lock = threading.Lock()
        self._open: dict[str, threading.Event] = {}
        self.begun: set[str] = set()

    @property
    def most(self) -> int:
        return self._most

    def gate(self, name: str) -> threading.Event:
        return self._open.setdefault(name, threading.Event())

    def pass_through(self, name: str) -> str:
        with self._lock:
            self.begun.add(name)
            self.running += 1
            self._most = max(self._most, self.running)
        assert self.gate(name).wait(DEADLINE_S)
        with self._lock:
            self.running -= 1
        return name

    def open_all(self) -> None:
        for gate in list(self._open.values()):
            gate.set()


@pytest.fixture
def gates():
    made = Gates()
    yield made
    made.open_all()


@jumping
async def test_the_clock_of_a_call_starts_when_the_call_starts_not_while_it_waits_for_a_thread(gates):
    names = ["a", "b", "c", "d"]
    for name in names:
        gates.gate(name)

    calls = EnvExecutor(1)
    tasks = [asyncio.create_task(calls.run(gates.pass_through, name, LIMIT_S)) for name in names]
    for task, name in zip(tasks, names, strict=True):
        await until(lambda name=name: name in gates.begun)
        await jump(0.8 * LIMIT_S)  # the last one has waited for 2.4 limits by its turn
        gates.gate(name).set()
        assert await task == name
    assert calls.num_hung_calls == 0


def test_the_step_of_a_single_turn_is_called_by_what_its_author_wrote():
    class Short(SingleTurnTask):
        name = "short"

    assert where(Short().env().step) == "reward" and where(Gates().open_all) == "Gates.open_all"


@jumping
async def test_no_more_than_num_threads_calls_run_at_once(gates):
    names = [str(n) for n in range(12)]
    for name in names:
        gates.gate(name)

    calls = EnvExecutor(3)
    tasks = [asyncio.create_task(calls.run(gates.pass_through, name, LIMIT_S)) for name in names]
    await until(lambda: len(gates.begun) == 3)
    for _ in names:  # one after the other, so that three places are always taken
        gates.gate(next(name for name in names if name in gates.begun and not gates.gate(name).is_set())).set()
        await until(lambda: sum(task.done() for task in tasks) == sum(gates.gate(n).is_set() for n in names))
    await asyncio.gather(*tasks)
    assert gates.most == 3


def test_without_a_number_more_calls_run_while_they_wait_and_no_more_while_they_compute():
    waiting, computing = EnvExecutor(None), EnvExecutor(None)

    async def work():
        for calls, cpu_share in ((waiting, 0.001), (computing, 0.25)):  # four that share one core have a quarter each
            calls._num_queued = 1000
            for _ in range(200):
                calls._free_places(cpu_share)

    run(work)
    assert (waiting.num_places, computing.num_places) == (64, 4)


async def test_calls_that_sleep_get_more_threads_than_at_first():
    lock, running, most = threading.Lock(), [0], [0]

    def nap(argument):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    calls = EnvExecutor(None)
    await asyncio.gather(*(calls.run(nap, None, LIMIT_S) for _ in range(150)))
    assert 4 < most[0] <= calls.num_places <= 64


@jumping
async def test_slow_calls_are_seen_while_they_run_and_answers_counted_by_method(gates):
    gates.gate("a")
    gates.gate("b")

    calls = EnvExecutor(2)

    async def forever(argument):
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(calls.run(gates.pass_through, "a", LIMIT_S))]
    await until(lambda: "a" in gates.begun)
    await jump(8)
    tasks += [asyncio.create_task(calls.run(method, "b", LIMIT_S)) for method in (gates.pass_through, forever)]
    await until(lambda: "b" in gates.begun)
    assert calls.slow(10) == (0, 0.0)
    await jump(5)
    count, longest = calls.slow(10)
    assert count == 1 and longest == pytest.approx(13, abs=1)
    await jump(LIMIT_S)
    assert calls.slow(10) == (0, 0.0)  # given up: no longer running for an episode
    assert calls.num_answered.total() == 0
    with pytest.raises(ValueError, match="invalid literal"):
        await calls.run(int, "x", LIMIT_S)
    await calls.run(str.upper, "x", LIMIT_S)
    assert +calls.num_answered == {"int": 1, "upper": 1}
    await asyncio.gather(*tasks, return_exceptions=True)


@jumping
async def test_a_hung_call_is_reported_and_leaves_its_place_to_the_next(gates):
    gates.gate("hangs")

    calls = EnvExecutor(1)
    hung = asyncio.create_task(calls.run(gates.pass_through, "hangs", LIMIT_S))
    await until(lambda: "hangs" in gates.begun)
    await jump(LIMIT_S + 1)
    with pytest.raises(HungCallError, match="Gates.pass_through ran for more than env.step_timeout_s=100"):
        await hung
    assert (calls.num_hung_calls, calls.num_abandoned) == (1, 1)
    assert await calls.run(str.upper, "next", LIMIT_S) == "NEXT"

    gates.gate("hangs").set()  # it was slow, not dead: its thread is of use again
    await until(lambda: calls.num_abandoned == 0)
    assert await calls.run(str.upper, "later", LIMIT_S) == "LATER"
    assert gates.most == 1


@jumping
async def test_as_many_threads_as_before_serve_after_many_calls_have_hung(gates):
    hanging = [f"hangs{n}" for n in range(MAX_ABANDONED)]
    for name in [*hanging, "one", "two"]:
        gates.gate(name)

    calls = EnvExecutor(2)
    for first, second in zip(hanging[::2], hanging[1::2], strict=True):
        pair = [asyncio.create_task(calls.run(gates.pass_through, name, LIMIT_S)) for name in (first, second)]
        await until(lambda pair=(first, second): gates.begun.issuperset(pair))
        await jump(LIMIT_S + 1)
        assert [type(error) for error in await asyncio.gather(*pair, return_exceptions=True)] == [HungCallError] * 2
    both = [asyncio.create_task(calls.run(gates.pass_through, name, LIMIT_S)) for name in ("one", "two")]
    await until(lambda: gates.begun.issuperset({"one", "two"}))
    gates.open_all()
    assert await asyncio.gather(*both) == ["one", "two"]


@jumping
async def test_with_too_many_hung_calls_the_process_asks_to_be_restarted(gates):
    names = [f"hangs{n}" for n in range(MAX_ABANDONED + 1)]
    for name in names:
        gates.gate(name)

    calls = EnvExecutor(len(names))
    tasks = [asyncio.create_task(calls.run(gates.pass_through, name, LIMIT_S)) for name in names]
    await until(lambda: len(gates.begun) == len(names))
    assert not calls.exhausted
    await jump(LIMIT_S + 1)
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [HungCallError] * MAX_ABANDONED + [EngineError]
    assert calls.exhausted
    with pytest.raises(EngineError, match="17 environment calls hang .* restart this actor"):
        await calls.run(str.upper, "next", LIMIT_S)


@jumping
async def test_a_cancelled_caller_does_not_free_the_place_of_a_call_that_still_runs(gates):
    gates.gate("goes on")

    calls = EnvExecutor(1)
    cancelled = asyncio.create_task(calls.run(gates.pass_through, "goes on", LIMIT_S))
    await until(lambda: "goes on" in gates.begun)
    cancelled.cancel()
    waiting = asyncio.create_task(calls.run(gates.pass_through, "next", LIMIT_S))
    await asyncio.wait({cancelled})
    await jump(0)
    assert gates.begun == {"goes on"}
    gates.gate("goes on").set()
    gates.gate("next").set()
    assert await waiting == "next" and gates.most == 1


@jumping
async def test_an_async_call_that_hangs_is_cancelled_and_counted():
    ended = []

    async def hangs(argument):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(argument)

    async def own_timeout(argument):
        raise TimeoutError("a server of the environment's own")

    calls = EnvExecutor(1)
    task = asyncio.create_task(calls.run(hangs, "x", LIMIT_S))
    await asyncio.sleep(0)
    await jump(LIMIT_S + 1)
    with pytest.raises(HungCallError, match="hangs ran for more than"):
        await task
    assert ended == ["x"] and calls.num_hung_calls == 1
    with pytest.raises(TimeoutError, match="of the environment's own"):
        await calls.run(own_timeout, "y", LIMIT_S)
    assert calls.num_hung_calls == 1


@pytest.mark.parametrize(
    ("raised", "seen"), [(ValueError("v"), ValueError), (SystemExit(3), TaskError), (KeyboardInterrupt(), TaskError),
                         (StopIteration(), RuntimeError), (asyncio.CancelledError(), TaskError)]
)  # fmt: skip
async def test_whatever_a_call_raises_reaches_its_caller_as_an_ordinary_exception(raised, seen):
    def raises(argument):
        raise raised

    calls = EnvExecutor(1)
    with pytest.raises(seen):
        await calls.run(raises, None, LIMIT_S)
    assert await calls.run(str.upper, "next", LIMIT_S) == "NEXT"
