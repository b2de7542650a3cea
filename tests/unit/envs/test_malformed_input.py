"""What people get wrong in files, records and rewards: each is refused at the start with one clear message.

What only shows later, in a record that is drawn or a completion that is scored, costs that record or that episode: the
run goes on, and nothing of it reaches the learner (the last part).
"""

from __future__ import annotations

import asyncio
import json

import pytest

from actors.rollout import run_group
from envs.check import check_task
from envs.registry import task_of
from learner.hub.setup import build_ledger
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.environment import Task
from streamrl.errors import StreamrlError
from streamrl.messages import MemberStatus, Outcome, ReturnReason, VersionRef
from tests.unit.actors.fakes import installed_engine, lease, make_runner, run, says
from tests.unit.config.test_setting_effects_ledger import settings_of
from tests.unit.hub.factories import FakeActor

BASE = to_plain(load_config(["experiment=quickstart"]))
GOOD = {"question": "1 + 1 = ?", "answer": "2"}
OTHERS = [{"question": f"{a} + 1 = ?", "answer": str(a + 1)} for a in range(2, 30)]
REWARD = "def reward_fn(messages, answer):\n    return float(messages[-1]['content'] == answer)\n"


def lines(*records) -> str:
    """Records as JSON Lines, before 28 good ones; a text is a line as it is."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in (*records, *OTHERS)]
    return "\n".join(texts) + "\n"


def task_from(tmp_path, monkeypatch, *words, name="train.jsonl", text=None, reward=REWARD) -> Task:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "reward.py").write_text(reward)
    given = [word.partition("=")[0] for word in words]
    words += () if "data.path" in given else (f"data.path={name}",)
    words += () if "reward.type" in given or "env.path" in given else ("env.path=reward.py",)
    return task_of(from_plain(BASE, words))


# --- files -----------------------------------------------------------------------------------------------------------

FILES = {
    "no such file": ("gone.jsonl", None, "there is no such file"),
    "no such folder": ("gone/", None, "there is no such file"),
    "an unknown kind": ("train.xlsx", b"PK", "its name must end in .jsonl, .ndjson, .json, .csv"),
    "a packed file": ("train.jsonl.gz", b"\x1f\x8b", "unpack it first"),
    "an empty file": ("train.jsonl", b"", "holds no records"),
    "blank lines only": ("train.jsonl", b"\n \n\r\n", "holds no records"),
    "an empty list": ("train.json", b"[]", "holds no records"),
    "an unfinished list": ("train.json", b'[{"question": "1"}', "train.json is not JSON"),
    "a list of texts": ("train.json", b'["1 + 1", "2 + 2"]', "record 1: a str, not an object"),
    "an object in place of a list": ("train.json", b'{"data": [{}]}', "no prompt: it has the fields data"),
    "a number": ("train.json", b"7", "record 1: a int, not an object"),
    "deeper than JSON goes": ("train.json", b"[" * 100_000, "train.json is not JSON"),
    "UTF-16": ("train.jsonl", lines(GOOD).encode("utf-16"), "record 1: not "),
    "Latin-1": ("train.jsonl", lines('{"question": "é", "answer": "2"}').encode("latin-1"), "save the file as UTF-8"),
    "a Python literal": ("train.jsonl", lines("{'question': '1 + 1', 'answer': '2'}"), "record 1: not JSON"),
    "a cut line": ("train.jsonl", lines(GOOD, '{"question": "1 +'), "record 2: not JSON"),
    "two objects on a line": ("train.jsonl", lines(GOOD, '{"question": "a"}{"question": "b"}'), "record 2: not JSON"),
    "NaN in JSON": ("train.jsonl", lines('{"question": "a", "answer": NaN}'), "record 1: not JSON"),
    "a list on a line": ("train.jsonl", lines('["1 + 1", "2"]'), "record 1: a list, not an object"),
    "CSV without a header": ("train.csv", b"", "must begin with a line of distinct column names"),
    "CSV with one column twice": ("train.csv", b"question,question\na,b\n", "distinct column names"),
    "CSV with a comma that is not quoted": ("train.csv", b"question,answer\n1, 2 or 3?,2\n", "(line 2): more fields"),
    "CSV with a missing field": ("train.csv", b"question,answer\na,1\nb\n", "record 2 (line 3): fewer fields"),
    "CSV with an open quote": ("train.csv", b'question,answer\n"a,1\n', "record 1: unexpected end of data: does a"),
    "CSV in Latin-1": ("train.csv", "question,answer\né,1\n".encode("latin-1"), "save it as UTF-8"),
    "Parquet that is not": ("train.parquet", b"PAR1 no", "is not a readable parquet file"),
    "Arrow that is not": ("train.arrow", b"no", "is not a readable arrow file"),
    "a split of a file": ("test@train.jsonl", None, "a single file has no split 'test'"),
    "one prompt for all": ("train.jsonl", (json.dumps(GOOD) + "\n") * 9, "holds one prompt only"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_with_its_name(tmp_path, monkeypatch, name):
    file, text, said = FILES[name]
    if "@" in file:
        (tmp_path / "train.jsonl").write_text(lines(GOOD))
    with pytest.raises(StreamrlError) as caught:
        check_task(task_from(tmp_path, monkeypatch, name=file, text=text))

    assert said in str(caught.value) and file.partition("@")[2][:5] in str(caught.value)


# --- records ---------------------------------------------------------------------------------------------------------

USER, ASSISTANT = {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}
RECORDS = {
    "no prompt": ({"text": "1 + 1", "answer": "2"}, "no prompt: it has the fields text, answer"),
    "no fields": ({}, "no prompt: it has no fields"),
    "an empty prompt": ({"question": " ", "answer": "2"}, "field 'question' is empty"),
    "a number as the prompt": ({"question": 11, "answer": "2"}, "field 'question' is 11 (int): give a text, or a list"),
    "null as the prompt": ({"question": None, "answer": "2"}, "field 'question' is None (NoneType)"),
    "no messages": ({"messages": []}, "field 'messages' is [] (list)"),
    "a text among messages": ({"messages": [USER, "hello"]}, "field 'messages', message 2 is 'hello' (str)"),
    "a message without a role": ({"messages": [{"content": "hi"}]}, "message 1 is {'content': 'hi'} (dict)"),
    "an unknown role": ({"messages": [{"role": "human", "content": "hi"}]}, "has the role 'human' (str): allowed are"),
    "a number as content": ({"messages": [{"role": "user", "content": 3}]}, "has 3 (int) as its content: give a text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only, images and audio",
    ),
    "the answer among messages": ({"messages": [USER, ASSISTANT]}, "ends with an assistant message: leave it out"),
    "messages as broken text": ({"messages": '[{"role": "user", '}, "field 'messages' holds text that is not JSON"),
    "tests that are a list": ({**GOOD, "test_cases": ["1"]}, "field 'test_cases' is ['1'] (list)"),
    "tests as broken text": ({**GOOD, "test_cases": "{inputs: 1}"}, "field 'test_cases' holds text that is not JSON"),
    "tests without outputs": ({**GOOD, "test_cases": {"inputs": ["1"]}}, "has None (NoneType) as its outputs"),
    "tests of unequal lengths": (
        {**GOOD, "test_cases": {"inputs": ["1", "2"], "outputs": ["1"]}}, "2 inputs and 1 outputs: give one output",
    ),
    "tests with a number": (
        {**GOOD, "test_cases": {"inputs": ["1", 2], "outputs": ["1", "2"]}}, "has 2 (int) as number 2 of its inputs",
    ),
    "tools that are text": ({**GOOD, "tools": ["search"]}, "field 'tools' is ['search'] (list): give a list of JSON"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_bad_record_is_refused_with_file_number_and_field(tmp_path, monkeypatch, name):
    record, said = RECORDS[name]
    with pytest.raises(StreamrlError) as caught:
        check_task(task_from(tmp_path, monkeypatch, text=lines(GOOD, record)))

    assert str(caught.value).startswith("train.jsonl, record 2: ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.prompt_key=query"], "record 1: no field 'query' (data.prompt_key); it has the fields question, answer"),
        (["data.answer_key=gold"], "record 1: no field 'gold' (data.answer_key); it has the fields question, answer"),
        (["data.answer_key=answer.text"], "no field 'answer.text'"),
        (["data.path=7"], "data.path=7 must be a path such as train.jsonl, or a list of them"),
        (["data.path=[]"], "data.path=[] must be a path"),
        (["data.weights=[1,2]"], "data.weights=[1.0, 2.0] must be 1 positive numbers"),
        (["data.test_ratio=1.5"], "data.test_ratio=1.5 must be in [0, 1): it is a share of the records"),
        (["data.test_path=gone.jsonl"], "data.test_path=gone.jsonl: there is no such file"),
        (["env.path=null"], "nothing says how answers are scored"),
    ],
)
def test_bad_settings_of_the_data_are_refused_by_name(tmp_path, monkeypatch, words, said):
    with pytest.raises(StreamrlError) as caught:
        check_task(task_from(tmp_path, monkeypatch, *words, text=lines(GOOD)))

    assert said in str(caught.value)


# --- rewards ---------------------------------------------------------------------------------------------------------

FN = "def reward_fn(messages, answer):\n    "
REWARDS = {
    "nothing": ("", "defines no reward. Found: nothing"),
    "another name": ("def score(messages):\n    return 1\n", "defines no reward. Found: score"),
    "two rewards": (REWARD + "def reward(completion):\n    return 1\n", "more than one reward: reward_fn, reward"),
    "no return": (FN + "answer == 1", "returned None: return a number"),
    "a text": (FN + "return '1.0'", "returned the text '1.0'"),
    "bytes": (FN + "return b'1'", "returned the text b'1'"),
    "NaN": (FN + "return float('nan')", "returned nan: a reward must be a finite number"),
    "infinity": (FN + "return -float('inf')", "returned -inf: a reward must be a finite number"),
    "huge": (FN + "return 1e30", "returned 1e+30: beyond 1e+06 it is taken for a mistake"),
    "an integer without end": (FN + "return 10**400", "reward_fn returned 1000000"),
    "a complex number": (FN + "return 1j", "returned 1j (complex)"),
    "an object": (FN + "return object()", "returned <object object"),
    "a function": (FN + "return max", "returned <built-in function max>"),
    "two values": (FN + "return 1.0, 0.5", "returned (1.0, 0.5), 2 values for one answer"),
    "no values": (FN + "return []", "returned [], 0 values for one answer"),
    "an empty dict": (FN + "return {}", "returned an empty dict"),
    "a part that is text": (FN + "return {'reward': 1, 'pred': 'x'}", "part 'pred', returned the text 'x'"),
    "a part that is NaN": (FN + "return {'a': float('nan')}", "part 'a', returned nan"),
    "a part without a name": (FN + "return {1: 1.0}", "returned a part named 1"),
    "a huge sum of parts": (FN + "return {'a': 9e5, 'b': 9e5}", "the sum of its parts returned 1.8e+06"),
    "a part with a long name": (FN + f"return {{'{'x' * 33}': 1.0}}", "returned a part named 'xxx"),
    "a coroutine": ("async def score(): return 1\n" + FN + "return score()", "returned a coroutine: define"),
    "an unknown field": ("def reward_fn(completion, gold):\n    return 1", "asks for gold, which this record does not"),
    "a required option": ("def reward_fn(completion, *, scale):\n    return 1", "asks for scale"),
    "positional only": ("def reward_fn(messages, /):\n    return 1", "parameters before a `/`"),
    "a batch of another length": ("def reward_fn(completions):\n    return [1, 1]", "for one completion it ret"),
    "a batch that is a number": ("def reward_fn(completions):\n    return 1.0", "for one completion it returned 1.0"),
    "an exception": (FN + "return messages[99]['content']", "raised IndexError: list index out of range"),
    "an exit": (FN + "raise SystemExit(3)", "SystemExit"),
    "a hang": ("import threading\n" + FN + "threading.Event().wait()", "ran for more than env.step_timeout_s=0.2"),
    "a broken file": ("def reward_fn(messages, answer)\n    return 1", "failed while it was loaded: SyntaxError"),
    "a list as system prompt": ("system_prompt = ['Add.']\n" + REWARD, "system_prompt must be a text, got ['Add.']"),
    "a missing package": ("import no_such_package\n" + REWARD, "No module named 'no_such_package'"),
    "a huge value of a class": (
        "from streamrl import Step\nclass Mine:\n    def reward(self, record, completion):\n        return Step(1e9)\n",
        "reward 1e+09 is beyond 1e+06",
    ),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_bad_reward_is_refused_at_the_start_with_its_value(tmp_path, monkeypatch, name):
    text, said = REWARDS[name]
    with pytest.raises(StreamrlError) as caught:
        check_task(task_from(tmp_path, monkeypatch, text=lines(GOOD), reward=text), limit_s=0.2)

    assert said in str(caught.value)


def test_an_option_that_the_reward_does_not_take_is_refused_with_those_that_it_takes(tmp_path, monkeypatch):
    with pytest.raises(StreamrlError, match="no option 'scal'. Did you mean scale?"):
        task_from(tmp_path, monkeypatch, "env.options.scal=2", text=lines(GOOD),
                  reward="def reward_fn(messages, answer, scale=1):\n    return scale\n")


def test_there_are_more_than_sixty_cases():
    assert len(FILES) + len(RECORDS) + len(REWARDS) >= 60


# --- what only shows while the run goes on ---------------------------------------------------------------------------

LATE = ["return None", "return 'ten'", "return float('nan')", "return 1e30", "return {}", "raise KeyError('gold')",
        "raise SystemExit", "return [1, 2]"]


@pytest.mark.parametrize("ending", LATE)
def test_a_reward_that_fails_on_some_answers_costs_these_members_and_nothing_else(tmp_path, monkeypatch, ending):
    reward = f"def reward_fn(completion):\n    if completion != 'bad':\n        return 1.0\n    {ending}\n"
    task = task_from(tmp_path, monkeypatch, text=lines(GOOD), reward=reward)
    check_task(task)

    async def work():
        def reply(prompt, seed, version):
            return says("bad" if seed == 1 else "fine")(prompt, seed, version)

        runner = make_runner(task, await installed_engine(reply))
        prompt = json.dumps(GOOD).encode()
        group = await run_group(lease(members=2, seeds=(0, 1), prompt=prompt), runner)

        assert group.outcome == Outcome.COMPLETE
        assert [(one.status, one.reward) for one in group.members] == [
            (MemberStatus.FINISHED, 1.0), (MemberStatus.ABORTED, 0.0),
        ]
        assert group.detail and runner.num_env_errors == 1

    run(work)


def test_a_bad_record_that_is_drawn_is_passed_over_and_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("envs.data.dataset.NUM_CHECKED", 1)
    bad = {"question": "2 + 2 = ?", "answer": "4", "tools": "[search"}
    task_from(tmp_path, monkeypatch, text=lines(GOOD, bad))
    words = (f"data.path={tmp_path / 'train.jsonl'}", "reward.type=exact", "data.shuffle=false", "data.test_ratio=0")
    ledger = build_ledger(settings_of(*words))
    ledger.versions.published(VersionRef(1, 0))
    actor = FakeActor(ledger, "a1", incarnation=11, slots=50)
    actor.join()
    good, poor, *_ = actor.ask()

    assert json.loads(good.prompt) == GOOD and poor.prompt is None
    assert "train.jsonl, record 2: field 'tools' holds text that is not JSON" in caplog.text
    group = asyncio.run(run_group(poor, None))
    assert group.reason == ReturnReason.PROMPT_INVALID
    assert actor.finish(poor, outcome=Outcome.RETURNED, reason=group.reason).kind != "rejected"
