"""Trajectories from GROUP frames, with the checks that training relies on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from streamrl.errors import ContentError
from streamrl.messages import TO_HUB, Group, GroupOrigin, Member, MemberStatus
from streamrl.messages.codec import Decoder, unpack_ids, unpack_logprobs
from streamrl.messages.validate import check_mask, check_spans, sets_of


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


class TrajectoryReader:
    """Decoder of the groups of a batch share; ids outside 0 .. vocab_size - 1 are refused, None does not check."""

    def __init__(self, *, vocab_size: int | None = None, max_bytes: int = 64 << 20) -> None:
        self._decoder = Decoder(TO_HUB, max_bytes)
        self._vocab_size = vocab_size

    def read(
        self, frames: Sequence[bytes], *, version: int | None, learner_epoch: int | None = None,
        origins: Sequence[GroupOrigin] = (),
    ) -> list[Trajectory]:
        """Trajectories of all frames, in order; aborted members are left out.

        Args:
            version, learner_epoch: that train on them; a token of a later one is refused. Version None: they are only
                read, so they may also be greedy.
            origins: of each frame, or none.
        Raises:
            WireError: a frame cannot be decoded, or its contents are impossible (`ContentError`).
        """
        sources: list[_Source] = []
        seen: set[tuple[int, int]] = set()
        for place, frame in enumerate(frames):
            group = self._decoder.decode(frame)
            if not isinstance(group, Group):
                raise ContentError("kind", f"expected a GROUP frame in a batch share, got {type(group).__name__}")
            if version is not None and not group.sampling.temperature > 0:
                raise ContentError(
                    "sampling",
                    f"group {group.group_id} was sampled at temperature {group.sampling.temperature}, which has no "
                    "log-probs",
                )
            origin = origins[place] if origins else _UNKNOWN
            for source in self._sources(group, origin):
                key = (group.group_id, source.member.index)
                if key in seen:
                    raise ContentError("duplicate", f"{source.name} is in the batch twice")
                seen.add(key)
                sources.append(source)
        columns = _columns(sources, self._vocab_size, version, learner_epoch)  # checks masks
        return _trajectories(sources, columns, self._vocab_size)

    def _sources(self, group: Group, origin: GroupOrigin) -> Iterator[_Source]:
        """The members that are not aborted; those with the same prompt share its array."""
        prompts: dict[bytes, np.ndarray] = {}
        for member in group.members:
            if member.status == MemberStatus.ABORTED:
                continue
            raw = member.prompt_ids or group.members[0].prompt_ids
            if raw not in prompts:
                prompts[raw] = unpack_ids(raw, vocab_size=self._vocab_size)
            later = tuple(
                (one.start, unpack_ids(one.prompt_ids, vocab_size=self._vocab_size)) for one in member.sequences
            )
            source = _Source(group, member, prompts[raw], origin, later)
            if not raw or not all(len(prompt) for _, prompt in later):
                raise ContentError("length", f"{source.name}: a sequence has no prompt, nothing predicts its start")
            yield source


_UNKNOWN = GroupOrigin("", -1)


class _Source(NamedTuple):
    """The messages that a trajectory is made from."""

    group: Group
    member: Member
    prompt_ids: np.ndarray
    origin: GroupOrigin
    later: tuple[tuple[int, np.ndarray], ...] = ()

    @property
    def name(self) -> str:
        return f"group {self.group.group_id} member {self.member.index}"


class _Columns(NamedTuple):
    """Tokens of many trajectories end to end, [N] each: an array operation costs more than a short trajectory."""

    places: list[int]  # where the tokens of each trajectory begin, and where the last one's end
    token_ids: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    turns: np.ndarray


def _trajectories(sources: Sequence[_Source], columns: _Columns, vocab_size: int | None) -> list[Trajectory]:
    rows = []
    places = columns.places
    for (group, member, prompt_ids, origin, later), start, end in zip(sources, places, places[1:], strict=False):
        rows.append(Trajectory(
            group_id=group.group_id, index=member.index, prompt_ids=prompt_ids,
            token_ids=columns.token_ids[start:end], logprobs=columns.logprobs[start:end], mask=columns.mask[start:end],
            versions=columns.versions[start:end], rewards=columns.rewards[start:end], turns=columns.turns[start:end],
            reward=member.reward, num_turns=len(member.turns), scores=member.scores,
            temperature=group.sampling.temperature, truncated=member.cut,
            judged=member.status == MemberStatus.FINISHED, actor_id=origin.actor_id, prompt_index=origin.prompt_index,
            later=later, sets=sets_of(group, member, vocab_size), agents=_agents(member),
        ))
    return rows


def _agents(member: Member) -> tuple[str, ...]:
    """The agent of each turn: that of its sequence."""
    if not member.agents:
        return ()
    starts = [one.start for one in member.sequences]
    return tuple(member.agents[bisect_right(starts, turn.start)] for turn in member.turns)


def _columns(
    sources: Sequence[_Source], vocab_size: int | None, version: int | None, learner_epoch: int | None
) -> _Columns:
    token_ids, logprobs = _unpacked(sources, vocab_size)
    places = [0, *accumulate(len(source.member.token_ids) // 4 for source in sources)]
    mask = np.zeros(len(token_ids), dtype=bool)
    for source, first, last in zip(sources, places, places[1:], strict=False):
        num_actions = check_mask(source.group, source.member, last - first)
        check_spans(source.group, source.member, last - first, num_actions)
        for start, end in source.member.mask:
            mask[first + start : first + end] = True
    return _Columns(
        places, token_ids, logprobs, mask, _token_versions(sources, places, mask, version, learner_epoch),
        _token_rewards(sources, places, mask), _token_turns(sources, places, mask),
    )


def _unpacked(sources: Sequence[_Source], vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and log-probs of all, [N] each."""
    members = [source.member for source in sources]
    try:
        if any(len(member.token_ids) % 4 or len(member.logprobs) != len(member.token_ids) for member in members):
            raise ContentError("length", "token ids and log-probs differ in length")
        ids = unpack_ids(b"".join([member.token_ids for member in members]), vocab_size=vocab_size)
        return ids, unpack_logprobs(b"".join([member.logprobs for member in members]))
    except ContentError:
        for member in members:  # say it of the one that it is true of
            unpack_logprobs(member.logprobs, num_tokens=len(unpack_ids(member.token_ids, vocab_size=vocab_size)))
        raise


def _token_versions(
    sources: Sequence[_Source], places: Sequence[int], mask: np.ndarray, version: int | None, learner_epoch: int | None
) -> np.ndarray:
    versions = np.full(len(mask), -1, dtype=np.int64)
    for source, first in zip(sources, places, strict=False):
        for span in source.member.versions:
            late = version is not None and span.version > version
            if late or (learner_epoch is not None and span.learner_epoch > learner_epoch):
                raise ContentError(
                    "version",
                    f"{source.name}: tokens {span.start}..{span.end} are of version "
                    f"{span.learner_epoch}:{span.version}, training is at {version}",
                )
            versions[first + span.start : first + span.end] = span.version
    versions[~mask] = -1
    return versions


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
