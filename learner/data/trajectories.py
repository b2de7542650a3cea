"""Trajectories from GROUP frames.

The hub checks a group once (`streamrl.messages.validate`), and ranks unpack what it has passed. What comes to training
past a hub, from a log or from a caller, goes through the same check here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from streamrl.errors import ContentError, WireError
from streamrl.messages import MAX_SEQUENCES, TO_HUB, BatchShare, Group, GroupOrigin, Limits, Member, MemberStatus
from streamrl.messages.codec import Decoder, unpack_ids, unpack_logprobs
from streamrl.messages.validate import check_group, is_scorable, unpack_sets

_GROUPS = Decoder({Group.KIND: TO_HUB[Group.KIND]}, max_bytes=1 << 32)
_ANY_MEMBER = range(1 << 16)
_UNKNOWN = GroupOrigin("", -1)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One sequence of a trajectory: tokens start..end followed these prompt ids."""

    prompt_ids: np.ndarray  # int32 [P]
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode as tokens. Arrays have length T, the tokens after the prompt: actions and observations alike.

    Where the history was rewritten, a trajectory consists of several sequences. Each token is computed in its own
    sequence; rewards, returns, advantages and weights are those of the one trajectory.
    """

    group_id: int
    index: int
    prompt_ids: np.ndarray  # int32 [P]
    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T] behavior log-probs in nats, 0 off the mask
    mask: np.ndarray  # bool [T] True on action tokens
    versions: np.ndarray  # int64 [T] version that sampled the token, -1 off the mask
    rewards: np.ndarray  # float32 [T] each turn's reward on its last action token; sums to `reward`
    turns: np.ndarray  # int64 [T] which turn an action token belongs to, counted from 0; 0 off the mask
    reward: float
    num_turns: int
    scores: Mapping[str, float]
    temperature: float
    truncated: bool  # cut by a limit of tokens or turns
    actor_id: str = ""
    prompt_index: int = -1  # in its split; -1 if the sender did not say
    later: tuple[tuple[int, np.ndarray], ...] = ()  # of each sequence after the first: its start in 0 .. T, its prompt
    judged: bool = False  # the environment was done: nothing follows the last reward, even where an answer was cut
    sets: tuple[np.ndarray, np.ndarray] | None = None
    """int64: how many ids each action token was drawn from, and these ids end to end; None: from all."""
    agents: tuple[str, ...] = ()
    """The agent of each turn; empty where none has a name."""

    @property
    def bootstraps(self) -> bool:
        """Cut before the environment was done: a critic's value of its end stands for the rewards that are missing."""
        return self.truncated and not self.judged

    @property
    def pieces(self) -> list[Piece]:
        """The sequences in order; together they cover 0 .. T."""
        if not self.later:
            return [Piece(self.prompt_ids, 0, len(self.token_ids))]
        starts = [0, *(start for start, _ in self.later), len(self.token_ids)]
        prompts = [self.prompt_ids, *(prompt for _, prompt in self.later)]
        return [Piece(prompt, *ends) for prompt, ends in zip(prompts, pairwise(starts), strict=True)]

    @property
    def num_tokens(self) -> int:
        """Prompts and responses of all sequences: what the token budget counts."""
        return len(self.prompt_ids) + sum(len(prompt) for _, prompt in self.later) + len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        return int(np.count_nonzero(self.mask))  # several times as fast as a sum of booleans


def read_groups(frames: Sequence[bytes], origins: Sequence[GroupOrigin] = ()) -> list[Trajectory]:
    """Trajectories of GROUP frames that a hub or `check_groups` has passed, in order; aborted members are left out.

    Args:
        origins: of each frame, or none.
    """
    sources: list[_Source] = []
    for frame, origin in zip(frames, origins or [_UNKNOWN] * len(frames), strict=True):
        group = _decode(frame)
        prompts: dict[bytes, np.ndarray] = {}
        for member in group.members:
            if member.status == MemberStatus.ABORTED:
                continue
            raw = member.prompt_ids or group.members[0].prompt_ids
            prompt = prompts.setdefault(raw, unpack_ids(raw))  # members share the array
            later = tuple((one.start, unpack_ids(one.prompt_ids)) for one in member.sequences)
            sources.append(_Source(group, member, prompt, origin, later))
    return _trajectories(sources, _columns(sources))


def check_groups(frames: Sequence[bytes], *, version: int, vocab_size: int | None = None) -> None:
    """Check frames of a log or of a caller as a hub checks what arrives.

    Args:
        version: that trains on them; a token of a later one is refused.
        vocab_size: token ids beyond are refused; None does not check.
    Raises:
        WireError: a frame cannot be decoded, or its contents are impossible (`ContentError`).
    """
    limits = Limits(max_sequences=MAX_SEQUENCES, vocab_size=vocab_size or 1 << 31)
    seen: set[tuple[int, int]] = set()
    for group in map(_decode, frames):
        wild = next((one for one in group.samplings if not is_scorable(one)), None)
        if group.members and wild is not None:
            how = f"was sampled at temperature {wild.temperature}, which has no log-probs"
            raise ContentError("sampling", f"group {group.group_id} {how}")
        for one in check_group(group, limits, _ANY_MEMBER):
            name = f"group {group.group_id} member {one.index}"
            if late := [ref for ref in one.all_versions if ref.version > version]:
                raise ContentError("version", f"{name} has tokens of version {late[0]}, training is at {version}")
            if not one.aborted and (group.group_id, one.index) in seen:
                raise ContentError("duplicate", f"{name} is in the batch twice")
            seen |= set() if one.aborted else {(group.group_id, one.index)}


def _decode(frame: bytes) -> Group:
    group = _GROUPS.decode(frame)
    assert isinstance(group, Group)
    return group


class _Source(NamedTuple):
    """The messages that a trajectory is made from."""

    group: Group
    member: Member
    prompt_ids: np.ndarray
    origin: GroupOrigin
    later: tuple[tuple[int, np.ndarray], ...] = ()


class _Columns(NamedTuple):
    """Tokens of many trajectories end to end, [N] each: an array operation costs more than a short trajectory."""

    places: list[int]  # where the tokens of each trajectory begin, and where the last one's end
    token_ids: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    turns: np.ndarray


def _trajectories(sources: Sequence[_Source], columns: _Columns) -> list[Trajectory]:
    rows = []
    places = columns.places
    for (group, member, prompt_ids, origin, later), start, end in zip(sources, places, places[1:], strict=False):
        rows.append(Trajectory(
            group_id=group.group_id, index=member.index, prompt_ids=prompt_ids,
            token_ids=columns.token_ids[start:end], logprobs=columns.logprobs[start:end], mask=columns.mask[start:end],
            versions=columns.versions[start:end], rewards=columns.rewards[start:end], turns=columns.turns[start:end],
            reward=member.reward, num_turns=len(member.turns), scores=member.scores,
            temperature=(member.sampling or group.sampling).temperature, truncated=member.cut,
            judged=member.status == MemberStatus.FINISHED, actor_id=origin.actor_id, prompt_index=origin.prompt_index,
            later=later, agents=_agents(member),
            sets=unpack_sets(member.sets, int(np.count_nonzero(columns.mask[start:end]))) if member.sets else None,
        ))
    return rows


def _agents(member: Member) -> tuple[str, ...]:
    """The agent of each turn: that of its sequence."""
    if not member.agents:
        return ()
    starts = [one.start for one in member.sequences]
    return tuple(member.agents[bisect_right(starts, turn.start)] for turn in member.turns)


def _columns(sources: Sequence[_Source]) -> _Columns:
    token_ids = unpack_ids(b"".join([source.member.token_ids for source in sources]))
    logprobs = unpack_logprobs(b"".join([source.member.logprobs for source in sources]))
    places = [0, *accumulate(len(source.member.token_ids) // 4 for source in sources)]
    mask = np.zeros(len(token_ids), dtype=bool)
    versions = np.full(len(token_ids), -1, dtype=np.int64)
    for source, first in zip(sources, places, strict=False):
        for start, end in source.member.mask:
            mask[first + start : first + end] = True
        for span in source.member.versions:
            versions[first + span.start : first + span.end] = span.version
    versions[~mask] = -1
    return _Columns(
        places, token_ids, logprobs, mask, versions, _token_rewards(sources, places, mask),
        _token_turns(sources, places, mask),
    )


def _token_rewards(sources: Sequence[_Source], places: Sequence[int], mask: np.ndarray) -> np.ndarray:
    """Turn rewards on the last action token of their turn; what the turns do not account for, on the last of all."""
    rewards = np.zeros(len(mask), dtype=np.float64)
    actions = np.flatnonzero(mask)
    firsts = np.searchsorted(actions, places).tolist()  # action tokens before each trajectory, and in all
    for source, place, first, last in zip(sources, places, firsts, firsts[1:], strict=False):
        if first == last:
            continue  # nothing that could have a reward
        rest = source.member.reward
        if len(turns := source.member.turns) > 1:  # the last action of a single one is the last of all
            befores = np.searchsorted(actions, [place + turn.end for turn in turns])
            for turn, before in zip(turns, befores, strict=True):
                rewards[actions[max(before - 1, first)]] += turn.reward
            rest -= sum(turn.reward for turn in turns)
        rewards[actions[last - 1]] += rest
    return rewards.astype(np.float32)


def _token_turns(sources: Sequence[_Source], places: Sequence[int], mask: np.ndarray) -> np.ndarray:
    """Tokens after the last turn that was recorded belong to it."""
    turns = np.zeros(len(mask), dtype=np.int64)
    for source, first, last in zip(sources, places, places[1:], strict=False):
        for number, before in enumerate(source.member.turns[:-1], 1):
            turns[first + before.end : last] = number
    turns[~mask] = 0
    return turns


def read_share(
    share: BatchShare, *, max_tokens: int, vocab_size: int | None = None,
    check_rewards: Callable[[Sequence[Trajectory]], None] | None = None,
) -> tuple[list[Trajectory], str]:
    """The trajectories of this rank, and why packing or the objective would fail on them; "" if they would not.

    Args:
        max_tokens: that one micro-batch holds.
        vocab_size: of the policy, where the share does not come from a hub, which has checked its groups.
        check_rewards: raises a WireError for rows whose rewards the objective cannot use.
    """
    try:
        if vocab_size is not None:
            check_groups(share.groups, version=share.version, vocab_size=vocab_size)
        rows = read_groups(share.groups, share.origins)
        planned = {(row.group_id, row.index) for row in share.plan}
        for row in rows:
            _check(row, planned, max_tokens)
        if check_rewards is not None:
            check_rewards(rows)
    except WireError as error:
        return [], str(error)
    return rows, ""


def _check(row: Trajectory, planned: set[tuple[int, int]], max_tokens: int) -> None:
    where = f"group {row.group_id} member {row.index} of actor {row.actor_id or 'unknown'}"
    if (row.group_id, row.index) not in planned:
        raise ContentError("plan", f"{where} is not in the plan of its batch")
    if row.num_tokens > max_tokens:
        raise ContentError(
            "too_many_tokens",
            f"{where} has {row.num_tokens} tokens, more than learner.max_tokens_per_device={max_tokens} holds",
        )
