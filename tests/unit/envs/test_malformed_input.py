"""Common mistakes in files, records and rewards: each is refused at the start with one clear message.

What only shows later, in a record that is drawn or a completion that is scored, costs that record or that episode: the
run goes on, and nothing of it reaches the learner (the last part).
"""

import json
import math
import re

import pytest

from actors.rollout import run_group, sendable
from envs.check import check_task
from envs.registry import task_of
from learner.hub.setup import make_ledger
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.environment import MAX_REWARD, Task
from streamrl.errors import StreamrlError
from streamrl.messages import TO_HUB, Limits, MemberStatus, Outcome, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.messages.validate import check_group
from tests.kit.loops import run
from tests.unit.actors.fakes import VOCAB, installed_engine, lease, make_runner, says
from tests.unit.config.test_setting_effects_ledger import settings_of
from tests.unit.envs.malformed import FILES, FORMS, GOOD, LATE, NUMBERED, OTHERS, RECORDS, REWARD, REWARDS, lines
from tests.unit.hub.factories import FakeActor, publish

BASE = to_plain(load_config(["experiment=quickstart"]))
LIMITS = Limits(vocab_size=VOCAB)


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

@pytest.mark.parametrize("name", NUMBERED["FILES"].values(), ids=NUMBERED["FILES"])
def test_a_bad_file_is_refused_with_its_name(tmp_path, monkeypatch, name):
    file, text, said = FILES[name]
    if "@" in file:
        (tmp_path / "train.jsonl").write_text(lines(GOOD))
    with pytest.raises(StreamrlError) as caught:
        check_task(task_from(tmp_path, monkeypatch, name=file, text=text))

    assert said in str(caught.value) and file.rpartition("@")[2] in str(caught.value)


# --- records ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NUMBERED["RECORDS"].values(), ids=NUMBERED["RECORDS"])
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
        (["data.path=7"], "data.path=7: no such file"),
        (["data.path=[]"], "data.path=[] must be a path"),
        (["data.weights=[1,2]"], "data.weights=[1.0, 2.0] must be 1 positive numbers"),
        (["data.test_ratio=1.5"], "data.test_ratio=1.5 must be less than 1. Share that is held out"),
        (["data.test_path=gone.jsonl"], "data.test_path=gone.jsonl: no such file"),
        (["env.path=null"], "nothing says how answers are scored"),
    ],
)
def test_bad_settings_of_the_data_are_refused_by_name(tmp_path, monkeypatch, words, said):
    with pytest.raises(StreamrlError, match=re.escape(said)):
        check_task(task_from(tmp_path, monkeypatch, *words, text=lines(GOOD)))


# --- rewards ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NUMBERED["REWARDS"].values(), ids=NUMBERED["REWARDS"])
def test_a_bad_reward_is_refused_at_the_start_with_its_value(tmp_path, monkeypatch, name):
    text, said = REWARDS[name]
    with pytest.raises(StreamrlError, match=re.escape(said)):
        check_task(task_from(tmp_path, monkeypatch, text=lines(GOOD), reward=text), limit_s=0.2)


def test_an_option_that_the_reward_does_not_take_is_refused_with_those_that_it_takes(tmp_path, monkeypatch):
    with pytest.raises(StreamrlError, match="no option 'scal'. Did you mean scale?"):
        task_from(tmp_path, monkeypatch, "env.options.scal=2", text=lines(GOOD),
                  reward="def reward_fn(messages, answer, scale=1):\n    return scale\n")


def test_there_are_more_than_sixty_cases():
    assert sum(map(len, NUMBERED.values())) == len({number for table in NUMBERED.values() for number in table}) >= 60


# --- what only shows while the run goes on ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERED["LATE"].values(), ids=NUMBERED["LATE"])
def test_a_reward_that_fails_on_some_answers_costs_these_members_and_nothing_else(tmp_path, monkeypatch, name):
    form, does, said = LATE[name]
    task = task_from(tmp_path, monkeypatch, text=lines(GOOD), reward=FORMS[form].format(does))
    check_task(task)

    async def work():
        def reply(prompt, seed, version):
            return says("bad" if seed == 1 else "fine")(prompt, seed, version)

        limit_s = 0.3 if "step_timeout_s" in said else 30.0
        runner = make_runner(task, await installed_engine(reply), step_timeout_s=limit_s)
        granted = lease(members=3, seeds=(0, 1, 2), prompt=json.dumps(GOOD).encode())
        group = sendable(await run_group(granted, runner), granted, LIMITS)

        assert group.outcome == Outcome.COMPLETE and said in group.detail
        assert [one.status for one in group.members if one.index != 1] == [MemberStatus.FINISHED] * 2
        received = Decoder(TO_HUB, LIMITS.max_message_bytes).decode(encode(group))
        usable = [one for one in check_group(received, LIMITS, granted.members) if not one.aborted]
        numbers = [value for one in usable for value in (one.reward, *one.scores.values())]
        assert len(usable) >= 2 and all(math.isfinite(value) and abs(value) <= MAX_REWARD for value in numbers)
        if said:
            assert len(usable) == 2 and runner.num_env_errors == 1

    run(work)


def test_a_bad_record_that_is_drawn_is_passed_over_and_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("envs.data.dataset.NUM_CHECKED", 1)
    bad = {"question": "2 + 2 = ?", "answer": "4", "tools": "[search"}
    task_from(tmp_path, monkeypatch, text=lines(GOOD, bad))
    words = (f"data.path={tmp_path / 'train.jsonl'}", "reward.type=exact", "data.shuffle=false", "data.test_ratio=0")
    ledger = make_ledger(settings_of(*words))
    publish(ledger, VersionRef(1, 0))
    actor = FakeActor(ledger, "a1", incarnation=11, slots=50)
    actor.join()
    told = []
    ledger.prompts.tell = told.append
    good, after, *_ = actor.ask()

    assert json.loads(good.prompt) == GOOD and after.group_id == good.group_id + 2, "the bad one takes no lease"
    assert json.loads(after.prompt) == OTHERS[0] and ledger.counters()["num_dropped_prompt_invalid"] == 1
    assert len(told) == 1 and "train.jsonl, record 2: field 'tools' holds text that is not JSON" in told[0]
