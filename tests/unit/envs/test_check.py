"""The start-up check: each way to break the protocol is refused by name, and what is allowed passes."""

import itertools
import json
import signal
import threading

import pytest

from envs import check
from envs.check import check_task
from envs.registry import task_of
from streamrl.config.load import load_config
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


@pytest.mark.parametrize("awaits", [False, True])
def test_environments_that_were_tried_are_closed(awaits):
    closed = []

    class Closes:
        def reset(self, record):
            return [ChatMessage("user", record["prompt"])]

        def step(self, action):
            return Step(reward=1.0)

        def close(self):
            closed.append(self)

    async def close(self):
        closed.append(self)

    check_task(broken(env=lambda self: type("Env", (Closes,), {"close": close} if awaits else {})()))
    assert len(set(closed)) == len(closed) == 2  # one of each split


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


# --- The start-up check says so if a record's own answer earns nothing, in whatever form the reward looks for it

STRIP = 'def reward_fn(messages, answer):\n    return float(messages[-1]["content"].strip() == {})\n'
CONTAINED = "def reward_fn(completion, answer):\n    return float({} in completion)\n"
RAISES_LATER = (
    "def reward_fn(completion, answer):\n    if 'boxed' in completion:\n        raise ValueError(completion)\n"
    "    return float(completion == answer)\n"
)
TURNS = (
    "from streamrl import ChatMessage, Step\n\nclass Env:\n    def reset(self, record):\n"
    "        return [ChatMessage('user', record['question'])]\n\n    def step(self, action):\n"
    "        return Step(0.0, done=False, messages=[ChatMessage('user', 'more')])\n"
)
ALL = " (nor do 15 more of 16 records looked at)"
NUMBER = f"the right answer of the first record (1, a number) earns nothing: compare texts, or use str(answer){ALL}"
TEXT = f"the right answer of the first record ('1', a text) earns nothing: look at how the reward compares it{ALL}"


def told(tmp_path, monkeypatch, answer: object, *words: str, reward: str | None = None, late: object = None):
    """The lines of the check for 40 records with this answer, or for 20 of it and 20 with `late`."""
    monkeypatch.chdir(tmp_path)
    answers = [answer] * 20 + [answer if late is None else late] * 20
    records = [{"question": f"{n} + 1 - {n} = ?", "answer": one} for n, one in enumerate(answers)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if reward is not None:
        (tmp_path / "reward.py").write_text(reward)
        words = (*words, "env.path=reward.py")
    lines: list[str] = []
    task = task_of(load_config(["experiment=quickstart", "data.path=train.jsonl", *words]))
    check_task(task, notify=lines.append)
    return lines


@pytest.mark.parametrize(
    ("answer", "reward", "lines"),
    [
        (1, STRIP.format("answer"), [NUMBER]),
        (1, STRIP.format("str(answer)"), []),
        ("1", STRIP.format("answer"), []),
        ("1", STRIP.format("answer + ' '"), [TEXT]),
        (1, STRIP.format("answer") + "\n\ndef target(record):\n    return str(record['answer'])\n", [NUMBER]),
        (1, STRIP.format("answer").replace(" == answer)", " == answer) - 1.0"), [NUMBER]),  # -1 for a wrong one
        ("1", CONTAINED.format(r"'\\boxed{' + answer + '}'"), []),
        ("1", CONTAINED.format("'<answer> ' + answer"), []),
        ("1", CONTAINED.format("'FINAL ' + answer"), [TEXT]),
        ("1", "def reward_fn(completion):\n    return -float(len(completion))\n", []),
        ("1", RAISES_LATER, []),
        ("1", RAISES_LATER.replace("== answer", "== 3"), []),
        (None, "def reward_fn(completion):\n    return 0.0\n", []),
        ("1", TURNS, []),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_users_reward_is_asked_for_the_records_own_answer(tmp_path, monkeypatch, answer, reward, lines):
    words = ("env.max_turns=3",) if reward is TURNS else ()
    assert told(tmp_path, monkeypatch, answer, *words, reward=reward) == lines


@pytest.mark.parametrize("kind", ["exact", "math", "boxed", "think_answer_tags", "tags", "repetition", "length"])
@pytest.mark.parametrize("answer", [1, "1", r"\pi"])
def test_shipped_rewards_pay_the_records_own_answer_or_read_none(tmp_path, monkeypatch, kind, answer):
    assert told(tmp_path, monkeypatch, answer, f"reward.type={kind}") == []


def test_several_rewards_are_asked_together(tmp_path, monkeypatch):
    assert told(tmp_path, monkeypatch, 1, "reward.weights={exact: 1.0, repetition: 0.1}") == []
    assert told(tmp_path, monkeypatch, 1, "reward.weights={exact: 0.0, repetition: 0.1}") == []  # its score is 1


def test_records_after_the_first_are_looked_at(tmp_path, monkeypatch):
    (line,) = told(tmp_path, monkeypatch, "1", reward=STRIP.format("answer"), late=2)
    assert line.startswith("the right answer of record ") and "(2, a number) earns nothing: compare texts" in line
    assert "more of 16 records looked at)" in line


@pytest.mark.parametrize("kind", ["math", "boxed", "think_answer_tags"])
def test_a_whole_solution_without_a_box_is_no_answer(tmp_path, monkeypatch, kind):
    solution = "We add the numbers one by one and look at what is left of them.\n\n" * 5
    (line,) = told(tmp_path, monkeypatch, "1", f"reward.type={kind}", late=solution)
    assert f"{len(solution)} characters) is a whole text, not an answer: end it with \\boxed" in line
    for ending in (r"So it is $\boxed5$.", r"So it is \boxed{5}.", "#### 5"):
        assert told(tmp_path, monkeypatch, "1", f"reward.type={kind}", late=solution + ending) == []
    assert told(tmp_path, monkeypatch, "1", "reward.type=exact", late=solution) == []
