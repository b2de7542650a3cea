"""The start-up check: each way to break the protocol is refused by name, and what is allowed passes."""

import itertools
import signal
import threading

import pytest

from envs import check
from envs.check import check_task
from streamrl.environment import ChatMessage, SingleTurnTask, Step
from streamrl.errors import TaskError


class Good(SingleTurnTask):
    name = "good"

    def record(self, split, index):
        return {"prompt": f"{split} {index}"}

    def reward(self, record, completion):
        return 1.0


def broken(**methods):
    return type("Broken", (Good,), {"name": "broken", **methods})()


counter = itertools.count()
CASES = {
    "is not JSON": {"record": lambda self, split, index: {"prompt": {1, 2}}},
    "changes when asked for twice": {"record": lambda self, split, index: {"prompt": str(next(counter))}},
    "record raised KeyError: 'missing' (test_check.py, line": {"record": lambda self, s, i: {}["missing"]},
    "reward must be a finite number, got nan": {"reward": lambda self, record, text: float("nan")},
    "score must be a finite number, got inf": {"reward": lambda self, r, t: Step(reward=0.0, score=float("inf"))},
    "format must be a finite number, got 'x'": {"reward": lambda self, r, t: Step(reward=0.0, parts={"format": "x"})},
    "step raised TypeError": {"reward": lambda self, record, text: None},
    "at least 1 ChatMessage, got []": {"messages": lambda self, record: []},
    "got 'hello'": {"messages": lambda self, record: "hello"},
    "where ChatMessage(role, content) belongs": {"messages": lambda self, record: [{"role": "user", "content": "hi"}]},
    "gave the role 'human'": {"messages": lambda self, record: [ChatMessage("human", "hi")]},
    "must be a positive integer, got 0": {"num_test": 0},
    "step must give a list of at least 1 ChatMessage": {"reward": lambda self, r, t: Step(reward=0.0, done=False)},
    "target must return a string, got 3": {"target": lambda self, record: 3},
    "target and reward disagree": {
        "target": lambda self, record: "right",
        "reward": lambda self, record, text: float(text != "right"),
    },
}


@pytest.mark.parametrize("said", CASES)
def test_a_broken_task_is_refused_with_the_reason(said):
    with pytest.raises(TaskError) as caught:
        check_task(broken(**CASES[said]))

    assert said in str(caught.value)
    assert "task 'broken'" in str(caught.value)


def test_a_good_task_passes():
    check_task(Good())


def test_async_environments_are_played_too():
    class Waits:
        async def reset(self, record):
            return [ChatMessage("user", record["prompt"])]

        async def step(self, action):
            return Step(reward=float("inf"))

    with pytest.raises(TaskError, match="reward must be a finite number, got inf"):
        check_task(broken(env=lambda self: Waits()))


def test_environments_are_played_in_a_thread_where_signals_do_not_work():
    def reward(self, record, completion):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return 1.0

    with pytest.raises(TaskError, match=r"(?s)step raised ValueError: signal only works.*parsing_timeout=None"):
        check_task(broken(reward=reward))


def test_math_verify_with_its_defaults_is_refused_with_the_remedy():
    math_verify = pytest.importorskip("math_verify")

    def reward(limit):
        return lambda self, record, text: float(math_verify.verify(
            math_verify.parse("$2$", parsing_timeout=limit), math_verify.parse("$2$", parsing_timeout=limit),
            timeout_seconds=limit,
        ))

    check_task(broken(reward=reward(None)))
    with pytest.raises(TaskError, match="parsing_timeout=None and timeout_seconds=None"):
        check_task(broken(reward=reward(5)))


def test_an_alarm_in_a_thread_is_refused_even_if_the_reward_hides_the_error():
    def reward(self, record, text):
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            return 1.0
        except ValueError:
            return 0.0

    before = signal.signal
    with pytest.raises(TaskError, match="step uses signal.alarm and hides that it failed.\nActors run plain"):
        check_task(broken(reward=reward))
    assert signal.signal is before


def test_a_slow_call_is_told_while_it_runs(monkeypatch):
    monkeypatch.setattr(check, "SLOW_S", 0.05)
    said, heard = [], threading.Event()

    def notify(text):
        said.append(text)
        heard.set()

    def reward(self, record, text):
        return float(heard.wait(30))

    check_task(broken(reward=reward), notify=notify)

    assert "step has been running for 0.05 s; the limit is env.step_timeout_s=30." in said[0]


def test_a_call_that_hangs_is_refused():
    forever = threading.Event()

    with pytest.raises(TaskError, match=r"step ran for more than env\.step_timeout_s=0\.05"):
        check_task(broken(reward=lambda self, record, text: float(forever.wait())), limit_s=0.05)
    forever.set()


def test_an_object_that_is_not_a_task_is_named_by_its_type():
    with pytest.raises(TaskError, match="got a dict, not a task"):
        check_task({})
