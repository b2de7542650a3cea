"""Every reward by name over records, as a task plays it; services are real servers on loopback."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from actors.settings import episode_rules
from envs.data.shapes import RecordShape
from envs.data_task import task_from_data
from envs.json_service import listening
from envs.registry import task_of
from envs.rewards.answers import Boxed, Exact, FreeMath
from envs.rewards.registry import REWARDS, combine, make_reward
from envs.rewards.services import read_score
from envs.rewards.verifier_server import PATH, checking
from envs.sandbox import SandboxPool
from streamrl.config.load import load_config
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Step
from streamrl.errors import ConfigError, TaskError
from tests.fakes.service import in_thread
from tests.unit.envs.sandbox.bubblewrap import path_with_bwrap

RIGHT = r"so \boxed{4}"
ADD = "```python\nprint(int(input()) + int(input()))\n```"
TESTS = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}


@pytest.fixture
def play(tmp_path, monkeypatch) -> Callable[..., Step]:
    """play(completion, *settings, record=...): the step of one episode."""
    monkeypatch.chdir(tmp_path)

    def one(completion: str, *words: str, record: dict[str, Any] | None = None) -> Step:
        record = {"question": "2 + 2 = ?", "answer": "4"} if record is None else record
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(record | {"n": n}) + "\n" for n in range(40)))
        env = task_from_data(load_config(["experiment=quickstart", "data.path=train.jsonl", *words])).env()
        env.reset(record)
        step = env.step(completion)
        return asyncio.run(step) if inspect.isawaitable(step) else step

    return one


@pytest.mark.shows("reward.type")
@pytest.mark.parametrize(
    ("kind", "completion", "reward", "score"),
    [
        ("exact", " 4 ", 1, 1),
        ("exact", "four", 0, 0),
        ("boxed", RIGHT, 1, 1),
        ("boxed", "4", 0, 0),
        ("boxed", r"\boxed{8/2}", 1, 1),
        ("math", "it is 4", 1, 1),
        ("math", "<answer>4.0</answer>", 1, 1),
        ("math", "nothing", 0, 0),
        ("think_answer_tags", "<think>2 and 2</think><answer> 4 </answer>", 1, 1),
        ("think_answer_tags", "<answer>4</answer>", 0, 1),  # right, in the wrong form: evaluations count it
        ("tags", "<think>a</think><answer>5</answer>", 1, None),
        ("tags", "4", 0, None),
        ("repetition", "a b c d e f g h " * 6, -1, None),
        ("repetition", "a b c", 0, None),
        ("length", "x" * 1000, -0.25, None),
    ],
)
def test_a_reward_by_name(play, kind, completion, reward, score):
    step = play(completion, f"reward.type={kind}")
    assert step.reward == reward
    assert step.score == score


def test_format_and_answer_are_parts_of_their_own(play):
    assert play("<answer>4</answer>", "reward.type=think_answer_tags").parts == {"format_acc": 0.0, "ans_acc": 1.0}


@pytest.mark.parametrize(("words", "ends"), [
    ([], (("</answer>",), True)),
    (["rollout.train.sampling.stop=[x]"], (("x",), False)),
    (["rollout.train.sampling.ignore_eos=false"], (("</answer>",), False)),
    (["rollout.train.sampling.stop=[x]", "rollout.train.sampling.ignore_eos=true"], (("x",), True)),
    (["env.tools=[calculator]", "env.max_turns=2"], (("</answer>",), False)),  # a turn ends after its call
    (["reward.type=boxed"], ((), False)),
])
def test_tagged_answers_end_at_their_last_tag_alone_unless_told_otherwise(tmp_path, words, ends):
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2 = ?", "answer": "4"}\n')
    given = ["experiment=quickstart", f"data.path={tmp_path}/train.jsonl", "reward.type=think_answer_tags", *words]
    config = load_config(given)
    for sampling in (config.rollout.train.sampling, eval_sampling(config)):
        rules = episode_rules(config, sampling, task_of(config))
        assert (rules.stop, rules.ignore_eos) == ends


@pytest.mark.parametrize("kind", ["exact", "boxed", "math", "think_answer_tags"])
def test_a_records_target_earns_the_whole_reward(play, tmp_path, kind):
    play("4", f"reward.type={kind}")
    task = task_from_data(load_config(["experiment=quickstart", "data.path=train.jsonl", f"reward.type={kind}"]))
    assert play(task.target({"question": "?", "answer": "4"}), f"reward.type={kind}").reward == 1


@pytest.mark.parametrize("answer", ["#### ", r"It is \boxed{}", " \n"])
@pytest.mark.parametrize(("kind", "completion"), [(Exact, ""), (Boxed, r"\boxed{}"), (FreeMath, "<answer></answer>")])
def test_nothing_is_not_the_answer_to_a_record_whose_answer_is_empty(kind, completion, answer):
    reward = kind(RewardConfig(), RecordShape())
    assert reward({"question": "1 + 1", "answer": answer}, completion, ()).reward == 0.0


@pytest.mark.parametrize("kind", ["exact", "boxed", "math", "think_answer_tags"])
@pytest.mark.parametrize(("fields", "known"), [
    ({"answer": ["7"]}, "7"), ({"answer": [7]}, "7"), ({"solution": ["Add them all."], "final_answer": ["7"]}, "7"),
    ({"solution": "Add them all.", "final_answer": "7"}, "7"),
    ({"answer": []}, None), ({"answer": ["7", "seven"]}, None),
    ({"reward_model": {"ground_truth": {"target": ["7"]}}}, None),
])
def test_an_answer_in_a_list_of_one_is_that_answer_and_any_other_list_is_refused(kind, fields, known):
    reward, record = make_reward(RewardConfig(type=kind), RecordShape()), {"question": "3 + 4", **fields}
    completion = reward.target(record, "7") if hasattr(reward, "target") else "7"
    if known is None:
        with pytest.raises(TaskError, match="give one text or number"):
            reward(record, completion, ())
    else:
        assert reward(record, completion, ()).reward == 1.0


@pytest.mark.shows("reward.correct", "reward.format_tags", "reward.length_chars")
def test_settings_change_a_reward(play):
    assert play(RIGHT, "reward.type=boxed", "reward.correct=10").reward == 10
    assert play(RIGHT, "reward.type=boxed", "reward.format_tags=['<done>']").reward == 0
    assert play(RIGHT + "<done>", "reward.type=boxed", "reward.format_tags=['<done>']").reward == 1
    assert play("xxxxx", "reward.type=length", "reward.length_chars=10").reward == -0.5


@pytest.mark.shows("reward.timeout_s")
def test_a_comparison_that_does_not_end_is_wrong(play):
    assert play(r"\boxed{9^{9^{9^{9}}}}", "reward.type=boxed", "reward.timeout_s=0.3").reward == 0


@pytest.mark.shows("reward.num_workers")
def test_the_number_of_workers_is_set(play, monkeypatch):
    made: list[int] = []
    monkeypatch.setattr("envs.rewards.answers.WorkerPool", lambda module, workers, limit: made.append(workers))
    with pytest.raises(AttributeError):
        play(r"\boxed{5}", "reward.type=boxed", "reward.num_workers=3")
    assert made == [3]


@pytest.mark.shows("reward.weights")
def test_several_rewards_are_weighed_and_each_is_logged(play):
    step = play("<answer>4</answer>", "reward.weights={think_answer_tags: 1.0, math: 2.0, length: 0.5}",
                "reward.length_chars=36")  # fmt: skip
    assert step.reward == pytest.approx(2.0 - 0.25)
    assert step.score == 1.0
    assert step.parts["math"] == 1.0 and step.parts["length"] == -0.5 and step.parts["think_answer_tags"] == 0.0


def test_a_reward_that_is_none_does_not_apply():
    rewards = {"short": lambda record, text, prompt: None if "skip" in text else 2.0, "length": lambda *_: None}
    reward = combine(rewards | {"right": lambda record, text, prompt: 1.0}, {"short": 0.5, "length": 1.0, "right": 1.0})
    assert (reward({}, "4", []).reward, reward({}, "4", []).parts) == (2.0, {"short": 2.0, "right": 1.0})
    assert (reward({}, "skip", []).reward, reward({}, "skip", []).parts) == (1.0, {"right": 1.0})
    with pytest.raises(TaskError, match="reward length returned None"):
        combine(rewards, {"short": 0.5, "length": 1.0})({}, "skip", [])


def test_a_type_beside_weights_and_an_unknown_name_are_refused(play):
    with pytest.raises(ConfigError, match="leave one of them out"):
        play("4", "reward.type=math", "reward.weights={length: 1.0}")
    with pytest.raises(ConfigError, match="math"):
        play("4", "reward.type=maths")


CODE = {"question": "add", "test_cases": TESTS}


@pytest.mark.parametrize(
    ("completion", "words", "reward", "score"),
    [
        (ADD, (), 1, 1),
        (ADD.replace("```python", "").replace("```", ""), (), 0, 1),
        (ADD.replace("+", "-"), (), 0, 0),
        ("```python\nx = int(input()) + int(input())\nprint(3)\n```", (), 0, 0),
        ("```python\nx = int(input()) + int(input())\nprint(3)\n```", ("reward.code.partial=true",), 0.5, 0.5),
        ("```python\ndef\n```", (), 0, 0),
        ("```python\nwhile True: pass\n```", ("reward.code.case_timeout_s=0.3",), 0, 0),
        ("```python\nimport time; time.sleep(1)\n```", ("reward.code.total_timeout_s=0.3",), 0, 0),
        ("```python\nx = bytearray(200_000_000)\nprint(3)\n```", ("reward.code.memory_mb=100",), 0, 0),
    ],
)
@pytest.mark.shows(
    "reward.code.partial", "reward.code.case_timeout_s", "reward.code.total_timeout_s", "reward.code.memory_mb"
)
def test_programs_are_graded_by_their_cases(play, completion, words, reward, score):
    step = play(completion, "reward.type=code", *words, record=CODE)
    assert (step.reward, step.score) == (reward, score)
    assert score not in (1, 0.5) or step.parts["tests_passed"] == 2 * score


@pytest.mark.shows("reward.code.any_order", "reward.code.sandbox")
def test_order_and_sandbox_are_set(play, monkeypatch):
    record = {"question": "?", "test_cases": {"inputs": [""], "outputs": ["1 2"]}}
    program = "```python\nprint('2 1')\n```"
    assert play(program, "reward.type=code", record=record).reward == 0
    assert play(program, "reward.type=code", "reward.code.any_order=true", record=record).reward == 1
    spy = "```python\nimport os\nprint('1 2' if os.path.exists('/etc/passwd') else 'hidden')\n```"
    assert play(spy, "reward.type=code", "reward.code.sandbox=limited", record=record).reward == 1
    monkeypatch.setenv("PATH", path_with_bwrap())
    try:
        SandboxPool("2", 1).close()
    except TaskError as error:
        with pytest.raises(TaskError, match="bubblewrap"):
            play(spy, "reward.type=code", "reward.code.sandbox=isolated", record=record)
        pytest.skip(str(error))
    assert play(spy, "reward.type=code", "reward.code.sandbox=isolated", record=record).reward == 0


def test_a_function_is_called_with_arguments_line_by_line(play):
    tests = {"inputs": ["[1, 2]\n3", '["a"]\n2'], "outputs": ["[1, 2, 1, 2, 1, 2]", '["a", "a"]'], "fn_name": "repeat"}
    program = "```python\nclass Solution:\n    def repeat(self, items, n):\n        return items * n\n```"
    assert play(program, "reward.type=code", record={"question": "?", "test_cases": tests}).reward == 1


@pytest.mark.parametrize(
    ("program", "arguments", "output", "reward"),
    [
        ("return 0.1 + 0.2", "1", "0.3", 1),
        ("return [[0.1 + 0.2], {'a': 3.0}]", "1", '[[0.3], {"a": 3}]', 1),
        ("return x", "1", "true", 0),
        ("return not x", "false", "true", 1),
        ("return not x", "false", "1", 0),
        ("return x + 1", "1" + "0" * 5000, "1" + "0" * 4999 + "1", 1),
        ("return float(x)", "12345678901234567891", "12345678901234567890", 0),
        ("return len(str(10**5000))", "1", "5001", 1),
        ("return x", '"a\u2028b"', '"a\u2028b"', 1),
        ("return x", "plain", "plain", 1),
    ],
)
def test_what_a_function_returns_is_compared_with_its_type(play, program, arguments, output, reward):
    tests = {"inputs": [arguments], "outputs": [output], "fn_name": "f"}
    completion = f"```python\ndef f(x):\n    {program}\n```"
    assert play(completion, "reward.type=code", record={"question": "?", "test_cases": tests}).reward == reward


def test_programs_read_and_print_numbers_of_any_length(play):
    tests = {"inputs": ["1" + "0" * 5000], "outputs": ["1" + "0" * 5000 + "1"]}
    record = {"question": "?", "test_cases": tests}
    assert play("```python\nprint(int(input()) * 10 + 1)\n```", "reward.type=code", record=record).reward == 1
    assert play("```python\nprint(int(input()) * 10 + 2)\n```", "reward.type=code", record=record).reward == 0


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of a server on loopback and what it shall answer and what it got: {status, reply, seen, failures}."""
    state: dict[str, Any] = {"failures": 0, "seen": [], "pause_s": 0.0, "now": 0, "most": 0}

    async def answer(request: web.Request, body: Any) -> tuple[int, Any]:
        state["now"] += 1
        state["most"] = max(state["most"], state["now"])
        state["seen"].append((body, request.headers.get("Authorization")))
        await asyncio.sleep(state["pause_s"])  # what a slow service does
        state["now"] -= 1
        failed = state["failures"] > 0
        state["failures"] -= failed
        return state.get("fail_with", 503) if failed else 200, state["reply"]

    with in_thread(listening(answer, "127.0.0.1", 0, max_bytes=1 << 20)) as (_, port):
        yield f"http://127.0.0.1:{port}/v1", state


def _chat(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.mark.shows(
    "reward.judge.url", "reward.judge.model", "reward.judge.prompt", "reward.judge.max_score",
    "reward.judge.max_tokens", "reward.judge.api_key_env",
)
def test_a_judge_reads_question_reference_and_answer(play, service, monkeypatch):
    url, state = service
    state.update(reply=_chat("Rather good, 2 flaws. Score: 4"), seen=[])
    monkeypatch.setenv("JUDGE_KEY", "k")
    step = play(
        "my {answer}", "reward.type=judge", f"reward.judge.url={url}", "reward.judge.model=big",
        "reward.judge.max_score=5", "reward.judge.max_tokens=9", "reward.judge.api_key_env=JUDGE_KEY",
        "reward.judge.prompt='Q {question} A {answer} C {completion}'",
    )  # fmt: skip
    assert (step.reward, step.parts) == (0.8, {"judge": 0.8})
    ((body, key),) = state["seen"]
    assert body["messages"][0]["content"] == "Q user: 2 + 2 = ? A 4 C my {answer}"
    assert (body["model"], body["max_tokens"], key) == ("big", 9, "Bearer k")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ({"score": 0.25}, 0.25),
        ({"data": [{"probs": [0.5]}]}, 0.5),
        ({"data": [{"data": [[-1.5]]}]}, -1.5),
        ([{"reward": 2}], 2.0),
    ],
)
@pytest.mark.shows("reward.model.url", "reward.model.model")
def test_a_reward_model_scores_the_conversation(play, service, reply, score):
    url, state = service
    state.update(reply=reply, seen=[])
    step = play("4", "reward.type=model", f"reward.model.url={url}", "reward.model.model=rm")
    assert step.reward == score
    assert state["seen"][0][0]["messages"][-1] == {"role": "assistant", "content": "4"}
    assert state["seen"][0][0]["model"] == "rm"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reward.type=model"], None),
        (["reward.type=model", "data.system_prompt='Be brief.'"], "Be brief."),
        (["reward.type=model", "data.system_prompt=auto"], None),
        (["reward.weights={model: 1, boxed: 1}", "data.system_prompt=auto"], Boxed.system_prompt),
        (["reward.weights={model: 1, boxed: 1}", "data.system_prompt='Be brief.'"], "Be brief."),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("tools", [None, [TOOL], json.dumps([TOOL])])
def test_a_reward_model_reads_the_system_prompt_and_the_tools_that_the_model_read(
    play, service, words, told, role, tools
):
    url, state = service
    state.update(reply={"score": 1}, seen=[])
    own = [] if role == "user" else [{"role": role, "content": "own"}]
    record = {"messages": [*own, {"role": "user", "content": "?"}], "answer": "4"} | ({"tools": tools} if tools else {})

    play("4", f"reward.model.url={url}", *words, record=record)

    ((body, _),) = state["seen"]
    own = own or ([] if told is None else [{"role": "system", "content": told}])
    assert body["messages"] == [*own, {"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]
    assert body["input"].startswith(f"{own[0]['role']}: {own[0]['content']}" if own else "user: ?")
    assert body.get("tools") == ([TOOL] if tools else None)


@pytest.mark.shows(
    "reward.judge.timeout_s", "reward.judge.max_concurrent", "reward.model.timeout_s", "reward.model.max_concurrent",
    "reward.model.api_key_env",
)
@pytest.mark.parametrize("kind", ["judge", "model"])
def test_a_slow_service_ends_in_an_error_and_few_requests_run_at_once(service, monkeypatch, kind):
    url, state = service
    monkeypatch.setenv("SERVICE_KEY", "k")
    settings = load_config([
        "experiment=quickstart", f"reward.type={kind}", f"reward.{kind}.url={url}", f"reward.{kind}.max_concurrent=2",
        f"reward.{kind}.timeout_s=0.2", f"reward.{kind}.api_key_env=SERVICE_KEY",
    ]).reward  # fmt: skip
    reward = make_reward(settings, RecordShape(None, None))

    async def ask(count: int) -> None:
        await asyncio.gather(*(reward({"question": "?"}, "4", [ChatMessage("user", "?")]) for _ in range(count)))

    while state["now"]:  # requests of the test before, whose senders gave up
        time.sleep(0.01)
    state.update(reply=_chat("Score: 1") if kind == "judge" else {"score": 1}, failures=0, seen=[], pause_s=0.0, most=0)
    asyncio.run(ask(8))
    assert state["most"] <= 2 and len(state["seen"]) == 8 and state["seen"][0][1] == "Bearer k"
    monkeypatch.setattr("envs.rewards.services.FIRST_PAUSE_S", 0.01)
    state["pause_s"] = 0.6
    with pytest.raises(TaskError, match="Timeout"):
        asyncio.run(ask(1))
    state["pause_s"] = 0.0


def test_a_service_that_is_busy_is_asked_again_and_one_that_refuses_is_not(play, service):
    url, state = service
    words = ("reward.type=model", f"reward.model.url={url}")
    state.update(reply={"score": 1}, failures=2, fail_with=503, seen=[])
    assert play("4", *words).reward == 1
    state.update(failures=1, fail_with=400, seen=[])
    with pytest.raises(TaskError, match="status 400"):
        play("4", *words)
    assert len(state["seen"]) == 1
    state.update(reply={"text": "none"}, failures=0)
    with pytest.raises(TaskError, match="holds no score"):
        play("4", *words)


@pytest.mark.parametrize("words", [
    "Score: {}", "Score: {}/10", "**Score:** {} / 10", "I rate this {}/10.", "The score is {}/10",
    "Rating (0 to 10): **{}**", "My rating is {} out of 10", "Score (0-10): {}", "{}",
    "Final score of {}. I found 2 errors in it.", '{{"score": {}}}',
    "1/10 at first, 10/10 for style. Score: {} out of 10",
])
@pytest.mark.parametrize("number", [0, 3, 7.5, 10])
def test_a_judges_number_is_read_in_any_form_that_judges_write_it(words, number):
    assert read_score(words.format(number), 10.0) == number / 10


def test_a_judge_without_number_address_or_key_is_an_error_that_says_so(play, service, monkeypatch):
    url, state = service
    state.update(reply=_chat("lovely"), failures=0)
    with pytest.raises(TaskError, match="gave no number"):
        play("4", "reward.type=judge", f"reward.judge.url={url}")
    with pytest.raises(ConfigError, match="reward.judge.url"):
        play("4", "reward.type=judge")
    with pytest.raises(ConfigError, match="NO_KEY_HERE"):
        play("4", "reward.type=judge", f"reward.judge.url={url}", "reward.judge.api_key_env=NO_KEY_HERE")
    with pytest.raises(ConfigError, match="{completion}"):
        play("4", "reward.type=judge", f"reward.judge.url={url}", "reward.judge.prompt=Hi")


@pytest.mark.shows("reward.code.url")
def test_programs_go_to_the_verifier_that_we_ship(play):
    with SandboxPool("auto", 1) as pool, in_thread(checking(pool, "127.0.0.1", 0)) as (_, port):
        url = f"http://127.0.0.1:{port}"
        words = ("reward.type=code", f"reward.code.url={url}{PATH}")
        assert play(ADD, *words, record=CODE).reward == 1
        assert play(ADD.replace("+", "-"), *words, record=CODE).reward == 0
        with pytest.raises(Exception, match="400"):
            play(ADD, "reward.type=code", f"reward.code.url={url}/else", record=CODE)


def test_every_reward_in_the_table_was_tested_here():
    text = open(__file__).read()
    assert [name for name in REWARDS if f'"{name}"' not in text and f"reward.type={name}" not in text] == []
