"""From GROUP frames to trajectories; what training would silently get wrong is checked again here, after the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.errors import ContentError
from streamrl.messages import TO_HUB, Group, GroupOrigin, Member, MemberStatus
from streamrl.messages.codec import Decoder, unpack_ids, unpack_logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode as tokens. Arrays have length T, the tokens after the prompt: actions and observations alike."""

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
    truncated: bool
    actor_id: str = ""
    prompt_index: int = -1  # in its split; -1 if the sender did not say

    @property
    def num_tokens(self) -> int:
        """Prompt and response together, P + T: what the token budget counts."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        return int(self.mask.sum())


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
        rows: list[Trajectory] = []
        seen: set[tuple[int, int]] = set()
        for place, frame in enumerate(frames):
            group = self._decoder.decode(frame)
            if not isinstance(group, Group):
                raise ContentError("kind", f"expected a GROUP frame in a batch share, got {type(group).__name__}")
            for member in group.members:
                if member.status == MemberStatus.ABORTED:
                    continue
                key = (group.group_id, member.index)
                if key in seen:
                    raise ContentError("duplicate", f"member {key[1]} of group {key[0]} is in the batch twice")
                seen.add(key)
                row = self._trajectory(group, member, version, learner_epoch)
                if origins:
                    row = replace(row, actor_id=origins[place].actor_id, prompt_index=origins[place].prompt_index)
                rows.append(row)
        return rows

    def _trajectory(self, group: Group, member: Member, version: int | None, learner_epoch: int | None) -> Trajectory:
        name = f"group {group.group_id} member {member.index}"
        prompt_ids = unpack_ids(member.prompt_ids or group.members[0].prompt_ids, vocab_size=self._vocab_size)
        token_ids = unpack_ids(member.token_ids, vocab_size=self._vocab_size)
        if not len(prompt_ids):
            raise ContentError("length", f"{name} has no prompt: nothing predicts its first token")
        if version is not None and not group.sampling.temperature > 0:
            raise ContentError(
                "sampling", f"{name} was sampled at temperature {group.sampling.temperature}, which has no log-probs"
            )
        mask = np.zeros(len(token_ids), dtype=bool)
        for start, end in member.mask:
            _check_range(name, "mask", start, end, len(token_ids))
            mask[start:end] = True
        return Trajectory(
            group_id=group.group_id, index=member.index, prompt_ids=prompt_ids, token_ids=token_ids, mask=mask,
            logprobs=unpack_logprobs(member.logprobs, num_tokens=len(token_ids)),
            versions=_token_versions(name, member, mask, version, learner_epoch),
            rewards=_token_rewards(name, member, mask), turns=_token_turns(member, mask), reward=member.reward,
            num_turns=len(member.turns), scores=member.scores, temperature=group.sampling.temperature,
            truncated=member.status == MemberStatus.TRUNCATED,
        )


def _check_range(name: str, field: str, start: int, end: int, num_tokens: int) -> None:
    if not 0 <= start < end <= num_tokens:
        raise ContentError("range", f"{name}: {field} has the range {start}..{end} in {num_tokens} tokens")


def _token_versions(
    name: str, member: Member, mask: np.ndarray, version: int | None, learner_epoch: int | None
) -> np.ndarray:
    versions = np.full(len(mask), -1, dtype=np.int64)
    for span in member.versions:
        start, end = span.start, span.end
        _check_range(name, "versions", start, end, len(mask))
        late = version is not None and span.version > version
        if late or (learner_epoch is not None and span.learner_epoch > learner_epoch):
            raise ContentError(
                "version",
                f"{name}: tokens {start}..{end} are of version {span.learner_epoch}:{span.version}, "
                f"training is at {version}",
            )
        if (versions[start:end][mask[start:end]] >= 0).any():
            raise ContentError("range", f"{name}: version spans overlap in tokens {start}..{end}")
        versions[start:end] = span.version
    if (versions[mask] < 0).any():
        raise ContentError("range", f"{name}: {int((versions[mask] < 0).sum())} action tokens have no version")
    versions[~mask] = -1
    return versions


def _token_rewards(name: str, member: Member, mask: np.ndarray) -> np.ndarray:
    """Turn rewards on the last action token of their turn; what the turns do not account for, on the last of all."""
    rewards = np.zeros(len(mask), dtype=np.float64)
    actions = np.flatnonzero(mask)
    if not len(actions):
        return rewards.astype(np.float32)
    for turn in member.turns:
        _check_range(name, "turns", turn.start, turn.end, len(mask))
        last = np.searchsorted(actions, turn.end) - 1
        rewards[actions[max(last, 0)]] += turn.reward
    rewards[actions[-1]] += member.reward - rewards.sum()
    return rewards.astype(np.float32)


def _token_turns(member: Member, mask: np.ndarray) -> np.ndarray:
    """Tokens after the last turn that was recorded belong to it."""
    ends = np.array([turn.end for turn in member.turns], dtype=np.int64)
    turns = np.searchsorted(ends, np.arange(len(mask)), side="right")
    return np.where(mask, np.minimum(turns, max(0, len(ends) - 1)), 0).astype(np.int64)
