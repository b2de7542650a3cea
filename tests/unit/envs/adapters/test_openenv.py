"""`env.name=openenv:URL`: episodes over the wire of OpenEnv, against a stand-in for its server."""

import json

import pytest

from envs.adapters.openenv import OpenEnvTask
from envs.registry import load_task
from streamrl.errors import ConfigError, TaskError
from streamrl.messages import MemberStatus, Outcome
from streamrl.named_code import check_allowed
from tests.flow.processes import wait_until
from tests.kit.loops import run
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.envs.adapters.fake_openenv import FakeOpenEnvServer
from tests.unit.envs.adapters.test_interfaces import TOKENIZER, Renderer

TOKENIZER.add_tokens(['"', "<think>", "</think>", "\n"])

pytestmark = pytest.mark.timeout(60)
TEXT = {"type": "string"}


def played(task, *said, seed=7, members=1, **rules):
    """The group of a lease in whose episodes the model says these texts, one a turn."""
    found = []

    async def work():
        engine = await installed_engine(lambda prompt, sampled, version: ids(said[turn_of(prompt)]))
        rules_ = {"max_prompt_tokens": 200, "max_new_tokens": 200, "max_turns": len(said), **rules}
        runner = make_runner(task, engine, renderer=Renderer(TOKENIZER, apply_chat_template=False), **rules_)
        found.append(await run_group(runner))
        await runner.close()

    async def run_group(runner):
        from actors.rollout import run_group

        return await run_group(lease(members=members, prompt=json.dumps({"seed": seed}).encode()), runner)

    def turn_of(prompt):
        """The number of answers in it: the model says each text once."""
        text, turn = TOKENIZER.decode(prompt), 0
        while turn < len(said) - 1 and said[turn] in text:
            text, turn = text.split(said[turn], 1)[1], turn + 1
        return turn

    run(work)
    return found[0]


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_answers_are_actions_observations_are_messages_and_each_turn_has_the_reward_of_its_step():
    with FakeOpenEnvServer() as server:
        group = played(load_task(f"openenv:{server.url}"), "4", "9", "7")
        reset, *steps = server.received
        wait_until(lambda: server.num_sessions == 0, 10, "the end of the session")

    (member,) = group.members
    assert reset == {"type": "reset", "data": {"seed": 7}}
    assert [one["data"] for one in steps] == [{"guess": 4}, {"guess": 9}, {"guess": 7}]
    assert [turn.reward for turn in member.turns] == pytest.approx([-0.3, -0.2, 1.0])
    assert member.scores["score"] == pytest.approx(0.5) and member.status == MemberStatus.FINISHED


@pytest.mark.parametrize("before", ["<think>4 or {\"guess\": 4}?</think>\n\n", "4?</think>"])
@pytest.mark.parametrize("form", ["number", "text", "json"])
def test_a_models_thoughts_are_no_part_of_its_action(before, form):
    kind = TEXT if form == "text" else {"type": "integer"}
    with FakeOpenEnvServer(action={"guess": kind}) as server:
        task = load_task(f"openenv:{server.url}", options={"action": "json"} if form == "json" else {})
        played(task, before + ('{"guess": 7}' if form == "json" else "7"))
        assert server.received[1]["data"] == {"guess": "7" if form == "text" else 7}


def test_a_thought_that_is_never_closed_holds_no_action():
    with FakeOpenEnvServer(action={"guess": TEXT}) as server:
        played(load_task(f"openenv:{server.url}"), "<think>is it 7", "7")
        assert [one["data"] for one in server.received[1:3]] == [{"guess": ""}, {"guess": "7"}]


def test_an_episode_that_is_not_over_with_its_last_turn_is_truncated():
    with FakeOpenEnvServer() as server:
        group = played(load_task(f"openenv:{server.url}"), "4", "9")
    (member,) = group.members
    assert member.status == MemberStatus.TRUNCATED and member.reward == pytest.approx(-0.5)


def test_a_field_that_may_be_a_text_is_one():
    with FakeOpenEnvServer(action={"guess": {"anyOf": [{"type": "string"}, {"type": "null"}]}}) as server:
        played(load_task(f"openenv:{server.url}"), "7")
        assert server.received[1]["data"] == {"guess": "7"}


def test_episodes_wait_for_a_free_session():
    with FakeOpenEnvServer(max_sessions=1) as server:
        group = played(load_task(f"openenv:{server.url}"), "7", members=3)
        assert server.most_sessions == 1 and server.num_refused > 0
    assert [member.reward for member in group.members] == [1.0] * 3


def test_what_is_no_action_is_told_to_the_model_and_costs_a_turn():
    with FakeOpenEnvServer() as server:
        group = played(load_task(f"openenv:{server.url}"), "x", "7")
    (member,) = group.members
    assert [turn.reward for turn in member.turns] == [0.0, 1.0] and member.status == MemberStatus.FINISHED


def test_a_model_may_write_the_whole_action_and_options_choose_fields():
    fields = {"hint": TEXT, "board": TEXT}
    options = {"action": "json", "observation": "board", "reset": {"level": 2}, "num_train": 5, "num_test": 3}
    with FakeOpenEnvServer(action={"guess": {"type": "integer"}, "say": TEXT}, observation=fields) as server:
        task = load_task(f"openenv:{server.url}", options=options)
        played(task, '{"guess": 7}')
        assert server.received[0]["data"] == {"seed": 7, "level": 2} and server.received[1]["data"] == {"guess": 7}
    assert (task.num_records("train"), task.num_records("test")) == (5, 3)
    seeds = [{task.record(split, index)["seed"] for index in range(task.num_records(split))}
             for split in ("train", "test")]
    assert not seeds[0] & seeds[1]


@pytest.mark.parametrize(("fails", "says"), [
    ("close", "ended the episode at step"), ("error", "the game broke"), ("hang", "env.step_timeout_s=0.5"),
    ("other", "an answer"),
])
def test_a_server_that_fails_inside_an_episode_loses_that_episode(fails, says):
    with FakeOpenEnvServer(fails=fails) as server:
        group = played(load_task(f"openenv:{server.url}"), "4", "7", step_timeout_s=0.5 if fails == "hang" else 30.0)
        wait_until(lambda: server.num_sessions == 0, 10, "the end of the session")
    assert group.outcome == Outcome.RETURNED and says in group.detail


def test_a_server_that_is_not_there_and_one_that_is_another_are_named():
    with FakeOpenEnvServer() as server:
        url = server.url
        other = played(load_task(f"openenv:{url}/elsewhere"), "7")
    assert "/elsewhere/schema has status 404" in other.detail
    assert f"no server of OpenEnv answers at {url}" in played(load_task(f"openenv:{url}"), "7").detail


@pytest.mark.parametrize("path", ["/schema", "/ws"])
def test_a_server_that_names_another_one_is_not_followed_there(path):
    with FakeOpenEnvServer() as elsewhere, FakeOpenEnvServer(redirects={path: elsewhere.url}) as server:
        group = played(load_task(f"openenv:{server.url}"), "7")
    assert f"{path} redirects to another address" in group.detail and not elsewhere.received


def test_fields_that_are_not_there_are_refused_with_those_that_are():
    with FakeOpenEnvServer(action={"guess": TEXT, "say": TEXT}) as server:
        unclear = played(load_task(f"openenv:{server.url}"), "7")
        nothing = played(load_task(f"openenv:{server.url}", options={"observation": "board"}), "7")
    assert "one of guess, say" in unclear.detail and "observation=board" in nothing.detail
    with pytest.raises(TaskError, match="openenv:http://HOST:PORT"):
        OpenEnvTask("localhost:8000")


def test_a_hub_may_not_name_a_server_that_the_actor_does_not_allow():
    given = {"env": {"name": "openenv:http://10.0.0.1:8000"}}
    with pytest.raises(ConfigError, match="actors.allow"):
        check_allowed(given, {})
    check_allowed(given, {"actors": {"allow": ["openenv:http://10.0.0.1:8000"]}})
