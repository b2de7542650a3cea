"""Agreement of actors' records with the learner's passes: sums by group and actor, for the hub to judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from learner.data.trajectories import Trajectory
from learner.objective.token_batch import TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.messages import Agreement


@dataclass(slots=True)
class _Sums:
    num_tokens: int = 0
    difference: float = 0.0
    num_drawn: int = 0
    num_other: int = 0


class Agreements:
    """The agreements of one batch: of its passes, which cost nothing, and of audits.

    Args:
        rows: the trajectories of the batch on this rank.
    """

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = rows
        self._measured: set[int] = set()
        self._sums: dict[tuple[int, str, int], _Sums] = {}
        self.mismatches: dict[int, Tensor] = {}  # place of an audited row -> log pi_v - log mu of its tokens, [A]

    def measure(self, tokens: TokenBatch) -> None:
        """A pass over some of them; each counts once, as it is first trained on."""
        places = tokens.micro.trajectory_ids
        differences = tokens.recorded_log_ratios.abs().double().sum(1)
        sums = differences, tokens.mask.sum(1), (tokens.lags * tokens.mask).amax(1)
        on_host = torch.stack([one.double() for one in sums]).tolist()  # one transfer
        for place, difference, num_tokens, lag in zip(places, *on_host, strict=True):
            if place not in self._measured:
                self._measured.add(place)
                self.add(self._rows[place], int(lag), int(num_tokens), difference)

    def add(
        self, row: Trajectory, lag: int, num_tokens: int, difference: float, num_drawn: int = 0, num_other: int = 0
    ) -> None:
        """`difference` is the sum of |log-ratio| over the tokens; one that is not finite says nothing of the actor."""
        if not math.isfinite(difference):
            return  # recorded log-probs are finite, so it is the learner that has trouble
        sums = self._sums.setdefault((row.group_id, row.actor_id, lag), _Sums())
        sums.num_tokens += num_tokens
        sums.difference += difference
        sums.num_drawn += num_drawn
        sums.num_other += num_other

    def take(self, ranks: Ranks) -> tuple[Agreement, ...]:
        """The agreements of all ranks, on every rank; a collective call."""
        mine = [
            Agreement(actor_id, lag, one.num_tokens, one.difference / one.num_tokens, one.num_drawn, one.num_other)
            for (_, actor_id, lag), one in self._sums.items() if actor_id and one.num_tokens
        ]
        self._sums = {}
        everyone = ranks.gather_bytes(msgspec.msgpack.encode(mine))
        return tuple(one for part in everyone for one in msgspec.msgpack.decode(part, type=list[Agreement]))
