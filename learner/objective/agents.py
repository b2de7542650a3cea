"""Advantages of agents that play one episode together: each one's rewards against those of the same agent in its group.

An entry is one agent in one trajectory; its score is the sum of the rewards of its turns. Entries stand in the place of
trajectories wherever a baseline or a scale is computed, and the advantage of a token is that of its turn's entry.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from learner.data.trajectories import Trajectory
from learner.objective import plan_tensors
from learner.objective.advantages import RowAdvantages
from learner.objective.plan_tensors import PlanTensors
from learner.ranks.mesh import Ranks
from streamrl.algorithms import Estimator
from streamrl.config.schema import AdvantageConfig

Key = tuple[int, int]
"""The place of a trajectory in the plan, and the number of an agent's name."""


def agent_advantages(
    rows: Sequence[Trajectory], stats: PlanTensors, advantage: AdvantageConfig, estimator: Estimator, ranks: Ranks
) -> RowAdvantages:
    """Advantages [R, U] of the turns of this rank's trajectories, U most turns of one; a collective call.

    The numbers of whole trajectories are means over their action tokens.
    """
    turns = [_numbers(row) for row in rows]
    places = stats.places.tolist()
    flat = [value for place, row, agents in zip(places, rows, turns, strict=True)
            for agent, score, count in _entries(row, agents) for value in (place, agent, score, count)]
    # Every rank computes all baselines from all entries, so they agree without another exchange.
    gathered = torch.cat([torch.tensor(part, dtype=torch.float64).view(-1, 4) for part in ranks.gather(flat)])
    entries = {(int(place), int(agent)): (score, count) for place, agent, score, count in gathered.tolist()}
    keys = sorted(entries)
    at = {key: number for number, key in enumerate(keys)}
    siblings = torch.tensor([[int(stats.group_ids[place]), agent] for place, agent in keys]).view(-1, 2)
    scores, counts = (torch.tensor([entries[key][part] for key in keys], dtype=torch.float64) for part in (0, 1))
    groups = siblings.unique(dim=0, return_inverse=True)[1]
    found = plan_tensors.row_advantages(
        replace(stats, scores=scores, group_ids=groups, num_tokens=counts.long(), places=torch.arange(len(keys))),
        advantage, estimator, lambda: plan_tensors.return_moments(rows, advantage, ranks),
    )
    by_turn = torch.zeros(len(rows), max((len(agents) for agents in turns), default=0), dtype=torch.float64)
    whole = torch.zeros(2, len(rows), dtype=torch.float64)
    for number, (place, row, agents) in enumerate(zip(places, rows, turns, strict=True)):
        mine = torch.tensor([at[place, agent] for agent in agents], dtype=torch.int64)
        by_turn[number, : len(mine)] = found.advantages[mine]
        tokens = mine[torch.from_numpy(row.turns[row.mask])]
        if len(tokens):
            whole[:, number] = torch.stack([found.advantages[tokens].mean(), found.baseline[tokens].mean()])
    return RowAdvantages(whole[0], whole[1], found.moments, by_turn)


def _numbers(row: Trajectory) -> list[int]:
    """The agent of each turn, as a number that is the same on every rank; one agent where none has a name."""
    return [zlib.crc32(name.encode()) for name in row.agents or ("",) * max(1, row.num_turns)]


def _entries(row: Trajectory, agents: Sequence[int]) -> list[tuple[int, float, int]]:
    """(agent, score, action tokens) of each agent of a trajectory."""
    of_token, rewards = np.array(agents)[row.turns], row.rewards.astype(np.float64)
    return [
        (agent, float(rewards[of_token == agent].sum()), int(np.count_nonzero(row.mask & (of_token == agent))))
        for agent in sorted(set(agents))
    ]
