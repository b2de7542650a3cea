"""Trajectories to micro-batches: rows laid end to end, no padding, at most so many tokens at once.

    sequence   = prompt tokens, then response tokens                    T tokens are scored from T - 1 hidden states
    packed row = sequence | sequence | ...                              [N]
               = prompt | response | response | ... | sequence          [N] where trajectories share their beginning
               = stem | prompt | response | response | prompt | ...     [N] where prompts share theirs, too
    scored     = action tokens only                                     [M], scattered into [S, A] for the algorithms

The algorithms see action tokens side by side: they step over gaps anyway, so observations need no columns. A trajectory
is one sequence, or several where its history was rewritten: attention and positions are those of each sequence, and the
action tokens of all stand in one row of [S, A], in order.

Legend: N packed tokens, S trajectories, M scored tokens, A most action tokens of a trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from learner.data.bins import first_fit
from learner.data.layout import PackedLayout, make_layout
from learner.data.shared_prompts import Family, Stem, find_families
from learner.data.token_sets import TokenSets, token_sets
from learner.data.trajectories import Trajectory
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError
from streamrl.messages import PlanRow


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
    num_shared: int = 0  # tokens that were not packed, because another trajectory has the same beginning
    has_gradient: bool = True  # False: only a forward pass, for statistics
    sets: TokenSets | None = None  # the ids that scored tokens were drawn from; None: from all

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
        movable = (f.name for f in fields(self) if f.name not in ("trajectory_ids", "num_shared", "has_gradient"))
        parts = ((name, getattr(self, name)) for name in movable)
        return replace(self, **{name: part.to(target) for name, part in parts if part is not None})


def pack(
    trajectories: Sequence[Trajectory], max_tokens: int, *, bootstrap: bool = False,
    places: Iterable[int] | None = None, share: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of whole trajectories, each at most `max_tokens` tokens; the same input gives the same output.

    Trajectories without action tokens have no loss and are left out.

    Args:
        bootstrap: keep the last token of trajectories that were cut before their environment was done.
        places: of the trajectories that are to be packed; None packs all.
        share: pack the common beginning of trajectories with the same prompt once; they go into one micro-batch, or
            into several with the beginning repeated if they are too many for one. What the prompts of a micro-batch
            have in common is packed once for all of them.
    Raises:
        ConfigError: the longest trajectory alone is over the budget.
    """
    chosen = range(len(trajectories)) if places is None else places
    actions = {i: trajectories[i].mask.nonzero()[0] for i in chosen}  # places of action tokens in the response
    trained = [i for i, places in actions.items() if len(places)]
    longest = max((trajectories[i].num_tokens for i in trained), default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"learner.max_tokens_per_device={max_tokens} (x learner.mesh.context) is below the longest trajectory of "
            f"{longest} tokens: raise it, or lower rollout.max_prompt_tokens or the sampling limit of new tokens."
        )
    tokens = {i: _needed(trajectories[i], actions[i], bootstrap) for i in trained}
    families = [Family((i,)) for i in trained]
    if share:
        first = {i: sequences[0] for i, sequences in tokens.items()}
        families = find_families(first, trajectories, max_tokens=max_tokens)
    return [
        _micro_batch(trajectories, actions, tokens, sorted(one, key=lambda f: f.members), bootstrap)
        for one in first_fit(families, trajectories, max_tokens)
    ]


def halves(whole: MicroBatch, trajectories: Sequence[Trajectory], *, bootstrap: bool, share: bool) -> list[MicroBatch]:
    """The trajectories of a micro-batch in two; `trajectories`, `bootstrap` and `share` are those of its `pack`."""
    places, middle = whole.trajectory_ids, len(whole.trajectory_ids) // 2
    budget = sum(trajectories[place].num_tokens for place in places)
    return [
        replace(part, has_gradient=whole.has_gradient) for chosen in (places[:middle], places[middle:])
        for part in pack(trajectories, budget, bootstrap=bootstrap, places=chosen, share=share)
    ]


def _needed(row: Trajectory, actions: np.ndarray, bootstrap: bool) -> list[np.ndarray]:
    """The tokens of each sequence of the trajectory that a pass needs."""
    found = []
    for piece in row.pieces:
        last = actions[np.searchsorted(actions, piece.end) - 1 if row.later else -1] - piece.start
        # The hidden state before an action token predicts it, so whatever comes after the last one is never needed.
        keep_last = bootstrap and row.bootstraps and piece.end == len(row.token_ids)
        length = len(piece.prompt_ids) + int(last) + int(keep_last)
        found.append(np.concatenate([piece.prompt_ids, row.token_ids[piece.start : piece.end]])[:length])
    return found


def pack_minibatches(
    trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], max_tokens: int, ranks: Ranks, *,
    num_minibatches: int = 1, bootstrap: bool = False, places: Iterable[int] | None = None,
    measured: Collection[int] | None = None, share: bool = False,
) -> list[list[MicroBatch]]:
    """The micro-batches of each minibatch, in the order of training, as many on every rank; a collective call.

    Args:
        plan: says which minibatch each trajectory belongs to.
        measured: those of the places that have no gradient and are only measured, in micro-batches of their own at the
            end; the same on every rank whether it is None.
        bootstrap, places, share: as for `pack`.
    """
    number_of = {(row.group_id, row.index): row.minibatch for row in plan}
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for place in range(len(trajectories)) if places is None else places:
        row = trajectories[place]
        parts[number_of[row.group_id, row.index]].append(place)
    found = []
    for one in parts:
        moved = one if measured is None else [place for place in one if place not in measured]
        passes = pack(trajectories, max_tokens, bootstrap=bootstrap, places=moved, share=share)
        found.append(equalize(passes, ranks))
        if measured is not None:
            still = [place for place in one if place in measured]
            passes = pack(trajectories, max_tokens, bootstrap=bootstrap, places=still, share=share)
            found[-1] += [replace(micro, has_gradient=False) for micro in equalize(passes, ranks, least=0)]
    return found


def equalize(micro_batches: list[MicroBatch], ranks: Ranks, *, least: int = 1) -> list[MicroBatch]:
    """The same number on every rank, because each pass runs FSDP2's collectives; a collective call itself.

    What is missing is filled with empty ones: one token, nothing scored, zero loss, zero gradients. There is at least
    one that has gradients, because an optimizer step with gradients of 0 is not the same as none: moments and weights
    decay.
    """
    most = max(least, int(ranks.maximum(float(len(micro_batches)))))
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


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """The sequences of families, end to end."""

    tokens: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N] in each sequence of a trajectory
    layout: PackedLayout
    where: dict[int, list[np.ndarray]]  # place of a trajectory -> packed position of each token of its sequences


def _laid_end_to_end(families: Sequence[Family], tokens: Mapping[int, Sequence[np.ndarray]]) -> _PackedRow:
    parts: list[tuple[np.ndarray, int, int]] = []  # tokens, position of the first, index of the part it continues
    where: dict[int, list[np.ndarray]] = {}
    total = 0

    def add(own: np.ndarray, first: int, head: int) -> np.ndarray:
        nonlocal total
        if len(own):  # a response of one token adds nothing to the prompt that predicts it
            parts.append((own, first, head))
        total += len(own)
        return np.arange(total - len(own), total)

    num_with = Counter(family.stem for family in families)
    begun: dict[Stem, tuple[np.ndarray, int]] = {}  # a stem's packed positions, and the index of its part
    for family in families:
        opening, shared, stem = tokens[family.members[0]][0], family.num_shared, family.stem
        common, head, start = np.zeros(0, dtype=np.int64), -1, 0
        if stem is not None and num_with[stem] > 1:
            start = stem.num_tokens
            if stem not in begun:
                begun[stem] = add(opening[:start], 0, -1), len(parts) - 1
            common, head = begun[stem]
        if shared > start:
            common, head = np.concatenate([common, add(opening[start:shared], start, head)]), len(parts) - 1
        for place in family.members:
            first, *later = tokens[place]
            own = add(first[len(common) :], len(common), head)
            where[place] = [np.concatenate([common, own]), *(add(sequence, 0, -1) for sequence in later)]
    layout = make_layout([len(own) for own, _, _ in parts], [head for _, _, head in parts])
    positions = [first + np.arange(len(own), dtype=np.int64) for own, first, _ in parts]
    return _PackedRow(
        np.concatenate([own for own, _, _ in parts]).astype(np.int64), np.concatenate(positions), layout, where
    )


def _score_positions(row: Trajectory, actions: np.ndarray, where: Sequence[np.ndarray]) -> np.ndarray:
    """Packed positions from which the action tokens of a trajectory are scored, in their order."""
    if not row.later:
        return where[0][len(row.prompt_ids) - 1 + actions]
    found = []
    for piece, packed in zip(row.pieces, where, strict=True):
        mine = actions[(piece.start <= actions) & (actions < piece.end)] - piece.start
        found.append(packed[len(piece.prompt_ids) + mine - 1])
    return np.concatenate(found)


def _micro_batch(
    trajectories: Sequence[Trajectory], actions_of: Mapping[int, np.ndarray],
    tokens: Mapping[int, Sequence[np.ndarray]], families: Sequence[Family], bootstrap: bool,
) -> MicroBatch:
    packed = _laid_end_to_end(families, tokens)
    members = sorted(packed.where)
    rows, actions = [trajectories[i] for i in members], [actions_of[i] for i in members]
    cut = np.array([bootstrap and row.bootstraps for row in rows])
    counts = np.array([len(places) for places in actions])
    mask = np.arange(counts.max())[None, :] < counts[:, None]
    index = [_score_positions(row, places, packed.where[i])
             for i, row, places in zip(members, rows, actions, strict=True)]
    ends = np.array([packed.where[i][-1][-1] for i in members], dtype=np.int64)

    def chosen(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name)[places] for row, places in zip(rows, actions, strict=True)])

    def spread(name: str, dtype: type) -> Tensor:
        out = np.zeros(mask.shape, dtype=dtype)
        out[mask] = chosen(name)
        return torch.from_numpy(out)

    targets = chosen("token_ids").astype(np.int64)
    return MicroBatch(
        trajectory_ids=tuple(members), packing=packed.layout, tokens=torch.from_numpy(packed.tokens),
        positions=torch.from_numpy(packed.positions),
        score_index=torch.from_numpy(np.concatenate(index).astype(np.int64)),
        targets=torch.from_numpy(targets), sets=token_sets(rows, targets),
        temperatures=torch.from_numpy(np.repeat(np.array([row.temperature for row in rows], dtype=np.float32), counts)),
        flat_index=torch.from_numpy(np.flatnonzero(mask.reshape(-1)).astype(np.int64)),
        mask=torch.from_numpy(mask), behavior_logprobs=spread("logprobs", np.float32),
        versions=spread("versions", np.int64), rewards=spread("rewards", np.float32), turns=spread("turns", np.int64),
        bootstrap_index=torch.from_numpy(ends[cut]),
        bootstrap_rows=torch.from_numpy(np.flatnonzero(cut).astype(np.int64)),
        num_shared=sum(len(one) for i in members for one in tokens[i]) - len(packed.tokens),
    )
