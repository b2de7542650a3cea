"""A function in a file is called with what its parameters ask for, and what it returns becomes a step."""

import asyncio
import inspect

import numpy as np
import pytest

from envs.check import check_task
from envs.data.shapes import RecordShape
from envs.data_task import player
from envs.reward_file import reward_from_file
from envs.reward_values import as_step
from streamrl.environment import ChatMessage, Step

TEXT = {"question": "2 + 2 = ?", "answer": "4", "level": 3, "extra_info": {"id": 7}}
CHAT = {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}
REPLY = {"role": "assistant", "content": "4"}


@pytest.fixture
def score(tmp_path):
    """score(file, completion, record, **options) -> the step of one episode."""

    def run(text, completion="4", record=TEXT, **options):
        path = tmp_path / "reward.py"
        path.write_text(text)
        found = reward_from_file(str(path), options, RecordShape())
        env = player(found, found.name, RecordShape())()
        env.reset(record)
        result = env.step(completion)
        return asyncio.run(result) if inspect.isawaitable(result) else result

    return run


FORMS = {
    "messages and answer": "def reward_fn(messages, answer):\n    return messages[-1]['content'] == answer",
    "by position of nothing": "def reward_fn(answer, *, completion):\n    return completion == answer",
    "every field": "def reward(prompt, completion, **record):\n    return completion == record['answer'] and "
                   "record['level'] == 3 and prompt == record['question']",
    "a field of the record": "def reward(completion, level):\n    return level == 3",
    "the record": "def reward(record, completion):\n    return record['answer'] == completion",
    "extra_info": "def reward_fn(extra_info):\n    return extra_info['id'] == 7 and extra_info['level'] == 3 and "
                  "extra_info['answer'] == '4' and 'question' not in extra_info",
    "TRL": "def reward_fn(prompts, completions, answer, **kwargs):\n    return [float(c == a) for c, a in "
           "zip(completions, answer)]",
    "TRL without names": "def reward(completions, **kwargs):\n    assert kwargs['prompts'] == ['2 + 2 = ?']\n"
                         "    return [1.0 if c == a else 0.0 for c, a in zip(completions, kwargs['answer'])]",
    "verl": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return solution_str == ground_truth",
    "async": "import asyncio\nasync def reward_fn(messages, answer):\n    await asyncio.sleep(0)\n"
             "    return messages[-1]['content'] == answer",
    "async TRL": "async def reward(completions, answer):\n    return [c == a for c, a in zip(completions, answer)]",
    "a method": "class Judge:\n    def __init__(self, right=1.0): ...\n"
                "    def reward(self, record, completion):\n        return completion == record['answer']",
    "an environment": "from streamrl import ChatMessage, Step\nclass Play:\n    def reset(self, record):\n"
                      "        self.answer = record['answer']\n        return [ChatMessage('user', 'sum')]\n"
                      "    def step(self, action):\n        return Step(float(action == self.answer))",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_reward_is_called_with_what_it_asks_for(score, tmp_path, form):
    record = {**TEXT, "data_source": "sums"} if form == "verl" else TEXT
    if form == "an environment":
        path = tmp_path / "reward.py"
        path.write_text(FORMS[form])
        env = reward_from_file(str(path), {}, RecordShape())()
        env.reset(record)
        assert (env.step("4").reward, env.step("5").reward) == (1.0, 0.0)
        return
    assert score(FORMS[form], record=record).reward == 1.0
    if "completion" in FORMS[form] and "level == 3" not in FORMS[form]:
        assert score(FORMS[form], "5", record=record).reward == 0.0


def test_a_conversation_reaches_the_reward_as_messages_in_every_form(score):
    everything = [*CHAT["prompt"], REPLY]
    assert score(f"def reward_fn(messages):\n    return messages == {everything}", record=CHAT).reward == 1
    assert score(f"def reward(prompt, completion):\n    return prompt == {CHAT['prompt']} and completion == '4'",
                 record=CHAT).reward == 1
    assert score(f"def reward(prompts, completions):\n    return [prompts == [{CHAT['prompt']}] and "
                 f"completions == [[{REPLY}]]]", record=CHAT).reward == 1


def test_options_are_parameters_of_the_function(score):
    text = "def reward_fn(messages, answer, scale=1):\n    return scale * (messages[-1]['content'] == answer)"

    assert (score(text).reward, score(text, scale=5).reward) == (1.0, 5.0)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (True, Step(1.0)), (0, Step(0.0)), (np.float32(0.5), Step(0.5)), (np.array(0.5), Step(0.5)), ([0.5], Step(0.5)),
        ({"right": 1, "form": 0.5}, Step(1.5, parts={"right": 1.0, "form": 0.5})),
        ({"reward": 2, "form": 0.5}, Step(2.0, parts={"form": 0.5})),
        ({"score": 1, "form": 0.5}, Step(1.0, score=1.0, parts={"form": 0.5})),
        ({"score": 1.0, "acc": True, "pred": "42"}, Step(1.0, score=1.0, parts={"acc": 1.0})),  # as in verl
        ({"right": 1, "form": None}, Step(1.0, parts={"right": 1.0})),  # as in TRL: it does not apply
        ({"reward": 2, "score": None, "seen": ["a", {}]}, Step(2.0)),
        ({"reward": 1.5, "score": 1}, Step(1.5, score=1.0)),
        (Step(3.0, score=1.0), Step(3.0, score=1.0)),
    ],
)
def test_what_a_reward_may_return(value, step):
    assert as_step(value, "reward.py") == step


def test_a_reward_may_change_its_record_without_changing_anyone_elses(score):
    text = "def reward(record, completion, extra_info):\n    record['answer'] = extra_info['id'] = None\n    return 1"
    before = {**TEXT, "extra_info": dict(TEXT["extra_info"])}
    score(text)

    assert TEXT == before


def test_tools_of_a_record_are_the_environments(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_fn(messages):\n    return 1")
    reward = reward_from_file(str(tmp_path / "reward.py"), {}, RecordShape())
    env = player(reward, reward.name, RecordShape())()
    tools = [{"type": "function", "function": {"name": "add"}}]

    for given in (tools, '[{"type": "function", "function": {"name": "add"}}]'):
        assert env.reset({**TEXT, "tools": given}) == [ChatMessage("user", "2 + 2 = ?")]
        assert env.tools == tools
    env.reset(TEXT)
    assert env.tools == []


def test_a_file_that_brings_records_of_its_own_still_is_a_task_and_a_reward_alone_says_what_it_lacks(tmp_path):
    from envs.registry import load_task

    (tmp_path / "alone.py").write_text("def reward_fn(messages, answer):\n    return 1\n")
    with pytest.raises(Exception, match="scores answers but holds no prompts: give it records with data.path="):
        check_task(load_task("", path=str(tmp_path / "alone.py")))
