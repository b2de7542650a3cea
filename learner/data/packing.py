"""Trajectories to micro-batches: rows laid end to end, no padding, at most so many tokens at once.

    trajectory = prompt tokens, then response tokens                    T tokens are scored from T - 1 hidden states
    packed row = trajectory | trajectory | ...                          [N]
    scored     = action tokens only                                     [M], scattered into [S, A] for the algorithms

The algorithms see action tokens side by side: they step over gaps anyway, so observations need no columns.

Legend: N packed tokens, S trajectories, M scored tokens, A most action tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from learner.data.layout import PackedLayout, make_layout
from learner.data.trajectories import Trajectory
from learner.mesh import Ranks
from streamrl.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward and backward pass of one rank."""

    trajectory_ids: tuple[int, ...]  # [S] places of the trajectories in the list that was packed
    packing: PackedLayout
    tokens: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    score_index: Tensor  # int64 [M]
    targets: Tensor  # int64 [M]
    temperatures: Tensor  # float32 [M]
    flat_index: Tensor  # int64 [M] place of each scored token in the flattened [S, A]
    mask: Tensor  # bool [S, A]
    behavior_logprobs: Tensor  # float32 [S, A]
    versions: Tensor  # int64 [S, A], 0 off the mask
    rewards: Tensor  # float32 [S, A]
    turns: Tensor  # int64 [S, A], the turn of each action token, 0 off the mask
    bootstrap_index: Tensor  # int64 [E] packed position of the last token of trajectories that were cut short
    bootstrap_rows: Tensor  # int64 [E] which of the S trajectories they are

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_scored(self) -> int:
        return self.targets.numel()

    @property
    def state_index(self) -> Tensor:
        """int64 [M + E] packed positions of all states with a value: before each scored token, and after each cut."""
        return torch.cat([self.score_index, self.bootstrap_index])

    def padded(self, scored: Tensor) -> Tensor:
        """Per-token values [M] as [S, A], 0 in the padding; differentiable."""
        flat = scored.new_zeros(self.mask.numel())
        return flat.index_copy(0, self.flat_index, scored).view(self.mask.shape)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on `device`."""
        target = torch.device(device)
        movable = (f.name for f in fields(self) if f.name != "trajectory_ids")
        return replace(self, **{name: getattr(self, name).to(target) for name in movable})


def pack(trajectories: Sequence[Trajectory], max_tokens: int, *, bootstrap: bool = False) -> list[MicroBatch]:
    """Micro-batches of whole trajectories, each at most `max_tokens` tokens; the same input gives the same output.

    First fit decreasing: longest first, into the first micro-batch with room, which needs at most 11/9 of the fewest
    possible. Trajectories without action tokens have no loss and are left out.

    Args:
        bootstrap: keep the last token of truncated trajectories, whose state a critic values.
    Raises:
        ConfigError: the longest trajectory alone is over the budget.
    """
    trained = [i for i, row in enumerate(trajectories) if row.mask.any()]
    longest = max((trajectories[i].num_tokens for i in trained), default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"learner.max_tokens_per_device={max_tokens} is below the longest trajectory of {longest} tokens: "
            "raise it, or lower rollout.max_prompt_tokens or the sampling limit of new tokens."
        )
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(trained, key=lambda i: (-trajectories[i].num_tokens, i)):
        need = trajectories[i].num_tokens
        which = next((b for b, free in enumerate(room) if free >= need), None)
        if which is None:
            bins.append([])
            room.append(max_tokens)
            which = len(bins) - 1
        bins[which].append(i)
        room[which] -= need
    return [_micro_batch(trajectories, sorted(members), bootstrap) for members in bins]


def equalize(micro_batches: list[MicroBatch], ranks: Ranks) -> list[MicroBatch]:
    """The same number on every rank, because each pass runs FSDP2's collectives; a collective call itself.

    What is missing is filled with empty ones: one token, nothing scored, zero loss, zero gradients.
    """
    most = int(ranks.maximum(float(len(micro_batches))))
    return micro_batches + [empty_micro_batch() for _ in range(most - len(micro_batches))]


def empty_micro_batch() -> MicroBatch:
    """A pass over one token that trains on nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        trajectory_ids=(), packing=make_layout([1]), tokens=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64), score_index=nothing, targets=nothing,
        temperatures=torch.zeros(0), flat_index=nothing, mask=torch.zeros(0, 0, dtype=torch.bool),
        behavior_logprobs=torch.zeros(0, 0), versions=torch.zeros(0, 0, dtype=torch.int64), rewards=torch.zeros(0, 0),
        turns=torch.zeros(0, 0, dtype=torch.int64), bootstrap_index=nothing, bootstrap_rows=nothing,
    )


def _micro_batch(trajectories: Sequence[Trajectory], members: list[int], bootstrap: bool) -> MicroBatch:
    rows = [trajectories[i] for i in members]
    actions = [np.flatnonzero(row.mask) for row in rows]  # places of action tokens in the response
    # The hidden state before an action token predicts it, so whatever comes after the last one is never needed.
    cut = np.array([bootstrap and row.truncated for row in rows])
    lengths = [len(row.prompt_ids) + int(places[-1]) + int(more)
               for row, places, more in zip(rows, actions, cut, strict=True)]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    width = max(len(places) for places in actions)
    counts = np.array([len(places) for places in actions])
    mask = np.arange(width)[None, :] < counts[:, None]
    index = [start + len(row.prompt_ids) + places - 1 for start, row, places in zip(starts, rows, actions, strict=True)]
    tokens = [np.concatenate([row.prompt_ids, row.token_ids])[:n] for row, n in zip(rows, lengths, strict=True)]

    def chosen(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name)[places] for row, places in zip(rows, actions, strict=True)])

    def spread(name: str, dtype: type) -> Tensor:
        out = np.zeros(mask.shape, dtype=dtype)
        out[mask] = chosen(name)
        return torch.from_numpy(out)

    return MicroBatch(
        trajectory_ids=tuple(members), packing=make_layout(lengths),
        tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
        score_index=torch.from_numpy(np.concatenate(index).astype(np.int64)),
        targets=torch.from_numpy(chosen("token_ids").astype(np.int64)),
        temperatures=torch.from_numpy(np.repeat(np.array([row.temperature for row in rows], dtype=np.float32), counts)),
        flat_index=torch.from_numpy(np.flatnonzero(mask.reshape(-1)).astype(np.int64)),
        mask=torch.from_numpy(mask), behavior_logprobs=spread("logprobs", np.float32),
        versions=spread("versions", np.int64), rewards=spread("rewards", np.float32), turns=spread("turns", np.int64),
        bootstrap_index=torch.from_numpy((starts + np.array(lengths) - 1)[cut].astype(np.int64)),
        bootstrap_rows=torch.from_numpy(np.flatnonzero(cut).astype(np.int64)),
    )
