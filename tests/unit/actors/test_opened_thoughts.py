"""Chat templates that end the prompt with <think>: the model's text holds no opening, and is paid as if it did."""

import json

import pytest

from actors.render import Renderer
from actors.rollout import run_group
from envs.registry import task_of
from streamrl.config.load import load_config
from streamrl.messages import Purpose
from tests.kit.loops import run
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_agents import AgentLoop, Q
from tests.unit.actors.test_rewritten_history import TEMPLATE, replies, tokenizer

OPENING = TEMPLATE.replace("<start>a:", "<start>a:<think>\n")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3"}}</tool_call>'
TAGGED = "so</think>\n<answer>4</answer>"


def play(tmp_path, template: str, said: list[str], *words: str, purpose: Purpose = Purpose.TRAIN):
    record = {"question": "q", "answer": "4"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record | {"n": n}) + "\n" for n in range(20)))
    task = task_of(load_config(["experiment=quickstart", f"data.path={tmp_path}/train.jsonl", *words]))
    found = []

    async def work() -> None:
        engine = await installed_engine(replies(*said))
        runner = make_runner(task, engine, renderer=Renderer(tokenizer(template)), max_turns=len(said),
                             max_prompt_tokens=80, max_new_tokens=120)  # fmt: skip
        found.append(await run_group(lease(prompt=json.dumps(record).encode(), purpose=purpose), runner))

    run(work)
    return found[0]


@pytest.mark.parametrize(
    ("kind", "said", "opened", "plain"),
    [
        ("think_answer_tags", TAGGED, (1, 1), (0, 1)),
        ("think_answer_tags", f"<think>{TAGGED}", (1, 1), (1, 1)),
        ("think_answer_tags", "so it is <answer>4</answer>", (0, 0), (0, 1)),
        ("tags", TAGGED, (1, 1), (0, 0)),
        ("math", "3 or 5</think>It is 4.", (1, 1), (1, 1)),
        ("math", "it is 4", (0, 0), (1, 1)),  # it only thought so
        ("exact", "so</think>\n4", (1, 1), (1, 1)),
        ("exact", "4", (0, 0), (1, 1)),
    ],
)
def test_an_opening_in_the_prompt_is_taken_as_given(tmp_path, kind, said, opened, plain):
    for template, wanted in ((OPENING, opened), (TEMPLATE, plain)):
        (member,) = play(tmp_path, template, [said], f"reward.type={kind}").members
        assert (member.reward, member.scores["score"]) == wanted


def test_the_reward_of_several_types_sees_the_opening_and_a_users_function_what_was_written(tmp_path):
    (member,) = play(tmp_path, OPENING, [TAGGED], "reward.weights={think_answer_tags: 1.0, tags: 0.5}").members
    assert member.reward == 1.5
    text = "def reward_fn(completion):\n    return type(completion) is str and completion.startswith('so')"
    (tmp_path / "reward.py").write_text(text)
    (member,) = play(tmp_path, OPENING, [TAGGED], f"env.path={tmp_path}/reward.py").members
    assert member.reward == 1


def test_evaluations_count_the_answers_that_are_paid(tmp_path):
    words = ("reward.type=think_answer_tags",)
    for said, answer in ((TAGGED, "4"), ("perhaps <answer>4</answer>", "")):
        group = play(tmp_path, OPENING, [said], *words, purpose=Purpose.EVAL)
        assert group.answers == (answer,)
    assert play(tmp_path, TEMPLATE, ["<answer>4</answer>"], *words, purpose=Purpose.EVAL).answers == ("4",)


@pytest.mark.parametrize(("said", "num"), [(f"perhaps {CALL}", 0), (f"so</think>{CALL}", 1), (CALL, 0)])
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_a_client_gets_no_call_that_the_model_only_thought_of(said, num, path):
    schema = {"name": "calculator", "parameters": {}, "input_schema": {}, "type": "function"}
    tool = {"/chat/completions": {"type": "function", "function": {"name": "calculator"}},
            "/messages": {key: schema[key] for key in ("name", "input_schema")}}.get(path, schema)

    async def agent(session, asks):
        body = {"messages": [Q], "input": "q", "tools": [tool]}
        found.append((await asks.post(path, json=body)).raise_for_status().text)
        return 1.0

    async def work(template):
        engine = await installed_engine(replies(said))
        runner = make_runner(AgentLoop(agent), engine, renderer=Renderer(tokenizer(template)), max_new_tokens=120,
                             max_prompt_tokens=80)  # fmt: skip
        await run_group(lease(prompt=b"{}"), runner)
        await runner.close()

    found: list[str] = []
    run(lambda: work(OPENING))
    run(lambda: work(TEMPLATE))
    kinds = ('"tool_calls": [', '"tool_use"', '"function_call"')
    assert [any(kind in text for kind in kinds) for text in found] == [num > 0, True]


def test_a_call_in_a_thought_that_the_template_opened_is_not_made(tmp_path):
    words = ("reward.type=exact", "env.tools=[calculator]", "env.max_turns=2")
    (member,) = play(tmp_path, OPENING, [f"perhaps {CALL}", "4"], *words).members
    assert (member.reward, member.scores["tool_calls"]) == (0, 0)
    (member,) = play(tmp_path, OPENING, [f"so</think>{CALL}", "yes</think>4"], *words).members
    assert (member.reward, member.scores["tool_calls"]) == (1, 1)
