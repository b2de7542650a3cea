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
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from learner.data.layout import PackedLayout, make_layout
from learner.data.shared_prompts import KEYS_PER_TOKEN, Family, Stem, find_families
from learner.data.trajectories import Trajectory
from learner.data.transfer import on_device
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
        sets = None if self.sets is None else on_device(self.sets, target)
        return on_device(replace(self, packing=self.packing.to(target), sets=sets), target)


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
    measured: Collection[int] | None = None, share: bool = False, max_measured_tokens: int | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of each minibatch, in the order of training, as many on every rank; a collective call.

    Args:
        plan: says which minibatch each trajectory belongs to.
        measured: those of the places that have no gradient and are only measured, in micro-batches of their own at the
            end, of `max_measured_tokens` if that is given; the same on every rank whether it is None.
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
            budget = max_measured_tokens or max_tokens
            passes = pack(trajectories, budget, bootstrap=bootstrap, places=still, share=share)
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


@dataclass(slots=True)
class _Bin:
    room: int  # tokens
    room_for_keys: int
    families: list[Family] = field(default_factory=list)
    stems: set[Stem] = field(default_factory=set)

    def need(self, family: Family, size: int) -> int:
        """Tokens that a family of this size adds."""
        return size - (family.stem.num_tokens if family.stem in self.stems else 0)

    def add(self, family: Family, size: int, num_keys: int) -> None:
        self.room -= self.need(family, size)
        self.room_for_keys -= num_keys
        self.families.append(family)
        if family.stem is not None:
            self.stems.add(family.stem)


def first_fit(families: Sequence[Family], rows: Sequence[Trajectory], max_tokens: int) -> list[list[Family]]:
    """The families of each micro-batch of at most `max_tokens` packed tokens, first fit decreasing.

    Longest first, into the first micro-batch with room. Families of one stem follow each other and go to where it is
    already, so that few micro-batches hold it.
    A micro-batch has at most `KEYS_PER_TOKEN * max_tokens` tokens where nothing is shared.
    """
    whole = {family: sum(rows[i].num_tokens for i in family.members) for family in families}
    sizes = {family: whole[family] - family.num_shared * (len(family.members) - 1) for family in families}
    bins: list[_Bin] = []
    for family in _largest_first(families, sizes):
        size, num_keys = sizes[family], whole[family]
        fitting = (one for one in bins if one.room >= one.need(family, size) and one.room_for_keys >= num_keys)
        chosen = min(fitting, key=lambda one: family.stem not in one.stems, default=None)
        if chosen is None:
            chosen = _Bin(max_tokens, KEYS_PER_TOKEN * max_tokens)
            bins.append(chosen)
        chosen.add(family, size, num_keys)
    return [one.families for one in bins]


def _largest_first(families: Sequence[Family], sizes: Mapping[Family, int]) -> list[Family]:
    """Sort by size, with all families of a stem at the place of its largest."""
    found: dict[Stem | Family, list[Family]] = {}
    for family in sorted(families, key=lambda family: (-sizes[family], family.members)):
        found.setdefault(family.stem or family, []).append(family)
    return [family for alike in found.values() for family in alike]


@dataclass(frozen=True, slots=True, eq=False)
class TokenSets:
    """The ids that scored tokens were drawn from, where sampling was truncated; every set holds its token once.

    Legend: P scored tokens with a set, K ids of all sets.
    """

    tokens: Tensor  # int64 [P] which of the scored tokens have a set; all others were drawn from every id
    owner: Tensor  # int64 [K] which of the P tokens an id is of
    ids: Tensor  # int64 [K]
    chosen: Tensor  # int64 [P] where in [K] the token itself is

    @property
    def sizes(self) -> Tensor:
        """Ids of each set, int64 [P]."""
        return torch.bincount(self.owner, minlength=len(self.tokens))


def token_sets(rows: Sequence[Trajectory], targets: np.ndarray) -> TokenSets | None:
    """The sets of trajectories whose action tokens lie end to end in `targets`; None if there are none."""
    found, tokens, first = [], [], 0
    for row in rows:
        count = row.num_action_tokens
        if row.sets is not None:
            found.append(row.sets)
            tokens.append(np.arange(first, first + count))
        first += count
    if not found:
        return None
    places = np.concatenate(tokens)
    sizes, ids = (np.concatenate(part) for part in zip(*found, strict=True))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    chosen = np.flatnonzero(ids == targets[places][owner])
    return TokenSets(*(torch.from_numpy(one) for one in (places, owner, ids, chosen)))


class LeaveOut(Enum):
    """The passes that a trajectory goes without if it cannot move a parameter."""

    NOTHING = "nothing"
    BACKWARD = "backward"  # a control reads their log-probs
    PASS = "pass"


def places_with_gradient(
    rows: Sequence[Trajectory], *, weights: Tensor, advantages: Tensor | None, oldest_lags: Tensor | None, version: int
) -> tuple[int, ...]:
    """Places of the trajectories that some token may give a gradient.

    A trajectory counts in every denominator whether it gets a pass or not, so leaving it out changes no gradient.

    Args:
        rows: R trajectories.
        weights: [R] factor of each trajectory's token losses.
        advantages: [R] of which every token's advantage is a multiple; None if they are not known yet.
        oldest_lags: int64 [R] tokens of a larger lag are masked; None masks none.
        version: that lags are counted to.
    """
    live = (weights != 0) & torch.tensor([bool(row.mask.any()) for row in rows], dtype=torch.bool)
    if advantages is not None:
        live &= advantages != 0
    if oldest_lags is not None:
        newest = torch.tensor([int(row.versions.max(initial=-1)) for row in rows], dtype=torch.int64)
        live &= version - newest <= oldest_lags
    return tuple(live.nonzero().squeeze(1).tolist())


def versions_of(rows: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Versions int64 [R, A] of the action tokens side by side, 0 in the padding, and where they are, bool [R, A]."""
    counts = np.array([row.num_action_tokens for row in rows], dtype=np.int64)
    mask = np.arange(counts.max(initial=0))[None, :] < counts[:, None]
    versions = np.zeros(mask.shape, dtype=np.int64)
    if mask.any():
        versions[mask] = np.concatenate([row.versions[row.mask] for row in rows])
    return torch.from_numpy(versions), torch.from_numpy(mask)
