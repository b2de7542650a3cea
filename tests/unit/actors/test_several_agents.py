"""Agents that play one episode together: whose call it is, whose sequence it continues, and whose reward it earns."""

import pytest

from envs.reward_values import as_step
from streamrl.errors import TaskError
from streamrl.messages import Outcome
from tests.unit.actors.test_agents import AgentLoop, Q, ask, play
from tests.unit.actors.test_rewritten_history import sequences
from tests.unit.envs.adapters.test_interaction_loops import START, member_of

U = {"role": "user", "content": "u"}


def named(name):
    return {"X-Agent-ID": name}


async def two(asks):
    """Both begin with the same question; then each is told of its own answer."""
    said = []
    for name in ("one", "two"):
        said.append((await ask(asks, Q, headers=named(name))).json()["choices"][0]["message"])
    for name, message in zip(("one", "two"), said, strict=True):
        await ask(asks, Q, message, U, headers=named(name))


def test_agents_never_go_on_with_each_others_sequences_and_each_is_paid_on_its_own_last_turn():
    async def agent(session, asks):
        await two(asks)
        return {"agents": {"one": 1.0, "two": -0.5}}

    group, requests = play(AgentLoop(agent), "x<end>", "x<end>", "7<end>", "8<end>")
    member = member_of(group)

    first = f"{START}|x<end><start>u:u<end><start>a:"
    assert sequences(member) == [f"{first}7<end>", f"{first}8<end>"] and member.agents == ("one", "two")
    assert len(requests) == 4  # equal calls of two agents are two calls
    assert [turn.reward for turn in member.turns] == [0.0, 1.0, 0.0, -0.5] and member.reward == 0.5
    assert member.scores == {"score": 0.5, "agent_one": 1.0, "agent_two": -0.5}


def test_without_names_all_calls_are_one_agents():
    async def agent(session, asks):
        first = (await ask(asks, Q)).json()["choices"][0]["message"]
        await ask(asks, Q, first, U)
        return 1.0

    member = member_of(play(AgentLoop(agent), "x<end>", "7<end>")[0])
    assert member.agents == () and len(sequences(member)) == 1


def test_a_reward_of_an_agent_that_had_no_turn_loses_the_trajectory_with_those_that_had():
    async def agent(session, asks):
        await ask(asks, Q, headers=named("one"))
        return {"agents": {"two": 1.0}}

    group, _ = play(AgentLoop(agent), "7<end>")
    assert group.outcome == Outcome.RETURNED
    assert "names the agent 'two'" in group.detail and "are of 'one'" in group.detail


def test_a_name_that_cannot_be_sent_is_refused_and_the_agent_goes_on():
    async def agent(session, asks):
        told.append(await ask(asks, Q, headers=named("x" * 27)))
        await ask(asks, Q, headers=named("one"))
        return 1.0

    told = []
    member = member_of(play(AgentLoop(agent), "7<end>")[0])
    assert told[0].status_code == 400 and "26" in told[0].json()["error"]["message"]
    assert member.agents == ("one",) and member.reward == 1.0


def test_a_trace_says_whose_sequence_it_is():
    async def agent(session, asks):
        await two(asks)
        traces.extend(session.client.trace())
        return 0.0

    traces = []
    play(AgentLoop(agent), "x<end>", "x<end>", "7<end>", "8<end>")
    assert [one["agent"] for one in traces] == ["one", "two"]


def test_rewards_of_agents_stand_beside_one_of_the_last_turn():
    step = as_step({"reward": 0.25, "agents": {"one": 1.0}, "calls": 3}, "agent")
    assert step.reward == 0.25 and step.agents == {"one": 1.0} and step.parts == {"agent_one": 1.0, "calls": 3.0}
    with pytest.raises(TaskError, match="agent 'one'"):
        as_step({"agents": {"one": None}}, "agent")
    with pytest.raises(TaskError, match="1 to 32"):
        as_step({"agents": {"x" * 27: 1.0}}, "agent")
