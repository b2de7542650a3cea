"""`advantage.by=agent`: each agent's rewards against those of the same agent in its group, token by token."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from learner.data.trajectories import read_groups
from learner.objective.plan import BatchPlan
from learner.objective.regularizers import LossWeights, Regularizers
from learner.ranks.mesh import Ranks
from streamrl.config.load import load_config
from streamrl.config.schema import AdvantageBy, AdvantageConfig, ConstraintConfig, EntropyConfig, KlConfig, LossConfig
from streamrl.errors import ConfigError
from streamrl.messages import Group, Outcome, ReturnReason, Sampling
from streamrl.messages.codec import encode
from tests.kit.learning import make_objective, plan_of, trajectory
from tests.unit.actors.test_several_agents import AgentLoop, play, two
from tests.unit.envs.adapters.test_interaction_loops import member_of
from tests.unit.learner.objective.test_advantages import advantages_of

NAMES = ("solver", "critic", "judge")


def rows_of(seed: int, groups: int = 3, size: int = 4):
    """Trajectories whose turns are of several agents, in any order, each turn with a reward of its own."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(groups * size):
        row = trajectory(rng, number // size, number % size, num_actions=int(rng.integers(4, 12)), with_gap=False)
        ends = sorted(rng.choice(np.arange(1, len(row.mask)), size=3, replace=False)) + [len(row.mask)]
        turns, rewards = np.zeros(len(row.mask), dtype=np.int64), np.zeros(len(row.mask), dtype=np.float32)
        for turn, end in enumerate(ends):
            turns[end:] = turn + 1
            rewards[end - 1] = rng.normal()
        found.append(replace(
            row, turns=turns, rewards=rewards, reward=float(rewards.sum()), num_turns=4,
            agents=tuple(rng.choice(NAMES, 4)),
        ))
    return found


def literal(rows, baseline: str, scale: str) -> list[list[float]]:
    """In float64, from the definition: agent by agent, group by group, with plain loops."""
    def score(row, agent):
        return sum(float(row.rewards[at]) for at, turn in enumerate(row.turns) if row.agents[turn] == agent)

    out = []
    for row in rows:
        of_turn = []
        for agent in row.agents:
            siblings = [other for other in rows if other.group_id == row.group_id and agent in other.agents]
            scores = [score(other, agent) for other in siblings]
            others = [score(other, agent) for other in siblings if other is not row]
            if not others:  # alone in its group: the agent's other rewards of the batch, never another agent's
                scores = [score(other, agent) for other in rows if agent in other.agents]
                others = [score(other, agent) for other in rows if agent in other.agents and other is not row]
            mine, mean = score(row, agent), sum(scores) / len(scores)
            base = {"group_mean": mean, "leave_one_out": sum(others) / len(others) if others else mine, "none": 0.0}
            value = mine - base[baseline]
            if scale == "std":
                spread = math.sqrt(sum((one - mean) ** 2 for one in scores) / max(1, len(scores) - 1))
                value /= spread + 1e-6 if len(scores) > 1 else 1.0
            of_turn.append(value)
        out.append([of_turn[turn] for turn in row.turns[row.mask]])
    return out


@pytest.mark.shows("advantage.by")
@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean", "none"])
@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize(("groups", "size", "max_tokens"), [(3, 4, 10_000), (3, 4, 40), (5, 2, 10_000), (6, 1, 10_000)])
def test_each_token_has_the_advantage_of_its_turns_agent(baseline, scale, groups, size, max_tokens):
    rows = rows_of(1, groups, size)
    settings = AdvantageConfig(baseline=baseline, scale=scale, by=AdvantageBy.agent)

    found = advantages_of(rows, settings, max_tokens=max_tokens)
    for number, values in enumerate(literal(rows, baseline, scale)):
        assert found[number][0].tolist() == pytest.approx(values, abs=2e-6)
    whole = advantages_of(rows, replace(settings, by=AdvantageBy.trajectory))
    assert any((found[i][0] - whole[i][0]).abs().max() > 0.1 for i in found)


def test_one_agent_alone_has_the_advantages_of_trajectories():
    rows = [replace(row, agents=()) for row in rows_of(2)]
    for scale in ("none", "std", "batch_std"):
        settings = AdvantageConfig(scale=scale)
        by_agent = advantages_of(rows, replace(settings, by=AdvantageBy.agent))
        whole = advantages_of(rows, settings)
        for number in whole:
            torch.testing.assert_close(by_agent[number][0], whole[number][0])


def test_ranks_that_hold_a_group_each_agree_with_one_rank_that_holds_all():
    rows, settings = rows_of(3), AdvantageConfig(by=AdvantageBy.agent, scale="batch_std")
    objective = make_objective(settings, LossConfig())
    whole = BatchPlan.from_batch(objective, rows, plan_of(rows), version=5, ranks=Ranks()).row_advantages.turns

    world = 2
    shares = [[row for row in rows if row.group_id % world == rank] for rank in range(world)]
    sent: list[list[float]] = []
    for rank in range(world):  # first what each sends, then with what all have sent
        ranks = together(rank, lambda flat: sent.append(flat) or [flat])
        BatchPlan.from_batch(objective, shares[rank], plan_of(rows, world=world), version=5, ranks=ranks)
    for rank in range(world):
        ranks = together(rank, lambda flat: sent)
        made = BatchPlan.from_batch(objective, shares[rank], plan_of(rows, world=world), version=5, ranks=ranks)
        mine = [number for number, row in enumerate(rows) if row.group_id % world == rank]
        torch.testing.assert_close(made.row_advantages.turns, whole[mine])


def together(rank: int, exchange):
    """Stand-in for one of several ranks, whose exchange is a function of what it sends."""
    return SimpleNamespace(dp_rank=rank, gather=lambda values: exchange(list(values)))


def test_a_game_of_two_trains_although_all_trajectories_earn_the_same():
    rows = []
    for row, sign in zip(rows_of(4, groups=1), (1, -1, 1, -1), strict=True):
        rewards = np.zeros_like(row.rewards)
        rewards[np.flatnonzero(row.turns == 2)[-1]], rewards[np.flatnonzero(row.turns == 3)[-1]] = sign, -sign
        rows.append(replace(row, rewards=rewards, reward=0.0, agents=("one", "two", "one", "two")))
    whole = advantages_of(rows, AdvantageConfig())
    by_agent = advantages_of(rows, AdvantageConfig(by=AdvantageBy.agent))
    assert all(whole[i][0].abs().max() == 0 for i in whole) and all(by_agent[i][0].abs().min() > 1 for i in by_agent)


def test_agents_arrive_with_the_frames_of_an_actor():
    async def agent(session, asks):
        await two(asks)
        return {"agents": {"one": 1.0, "two": -0.5}}

    member = member_of(play(AgentLoop(agent), "x<end>", "x<end>", "7<end>", "8<end>")[0])
    group = Group(incarnation=1, seq=1, group_id=3, attempt=0, outcome=Outcome.COMPLETE, reason=ReturnReason.NONE,
                  detail="", sampling=Sampling(), members=(member,), stats={})
    (row,) = read_groups([bytes(encode(group))])
    assert row.agents == ("one", "one", "two", "two")
    assert row.rewards[row.rewards != 0].tolist() == [1.0, -0.5] and row.reward == 0.5


@pytest.mark.parametrize(("settings", "says"), [
    ({"estimator": "gae"}, "advantage.estimator='gae'"),
    ({"baseline": "batch"}, "advantage.baseline='batch'"),
    ({"baseline": "opob"}, "advantage.baseline='opob'"),
])
def test_estimators_and_baselines_that_know_no_agents_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        make_objective(AdvantageConfig(by=AdvantageBy.agent, **settings), LossConfig())


def test_what_changes_the_reward_of_whole_trajectories_is_refused():
    loss, kl, constraint = LossConfig(), KlConfig(mode="reward_k1"), ConstraintConfig()
    shaped = Regularizers(kl, constraint, loss, LossWeights(kl, EntropyConfig(), constraint, loss))
    with pytest.raises(ConfigError, match="KL in the reward"):
        make_objective(AdvantageConfig(by=AdvantageBy.agent), loss, regularizers=shaped)
    with pytest.raises(ConfigError, match="advantage.by=agent set it to false"):
        load_config(["advantage.by=agent", "filter.zero_std=true"])
