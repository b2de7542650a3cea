"""The proof that the hard check on age (L2) works: it counts trajectories that a batch has in spite of it.

It shares no code with acceptance or `lag_rule`, so that no mistake there can hide here. The count must stay 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from learner.hub.ledger.tables.groups import GROUPS, GroupRecord, HeldGroup
from streamrl.messages import Group, Member, MemberStatus

FRAMES_EVERY = 16
"""Every so many batches, from the first on, one is read from its frames. The others go by the versions noted on
arrival, which takes a fifth of the time and none that grows with the length of answers."""


@dataclass
class LagProof:
    """Counts members with a token that is too old at the last optimizer step of their batch.

    Args:
        masks_old_tokens: a member needs one token within its bound, otherwise all of them must be.
    """

    steps_per_batch: int
    masks_old_tokens: bool
    num_batches: int = 0
    frames_every: ClassVar[int] = FRAMES_EVERY

    def num_violations(self, batch: Sequence[tuple[GroupRecord, HeldGroup]]) -> int:
        """Count in a batch that was just cut: each record with the group that goes to the ranks."""
        from_frames = self.num_batches % self.frames_every == 0
        self.num_batches += 1
        num = 0
        for record, group in batch:
            oldest = group.version + self.steps_per_batch - 1 - group.max_lag
            for versions in _in_frames(group.frames) if from_frames else _noted(record):
                fresh = [version >= oldest for version in versions]
                num += not (any(fresh) if self.masks_old_tokens else all(fresh))
        return num


def _noted(record: GroupRecord) -> Iterator[list[int]]:
    return ([span.version for span in member.spans] for member in record.members.values())


def _in_frames(frames: Iterable[bytes]) -> Iterator[list[int]]:
    """Yield the versions that each member's action tokens name."""
    for frame in frames:
        group = GROUPS.decode(frame)
        assert isinstance(group, Group)
        yield from (_versions(member) for member in group.members if member.status != MemberStatus.ABORTED)


def _versions(member: Member) -> list[int]:
    return [
        span.version for span in member.versions
        if any(span.start < stop and begin < span.end for begin, stop in member.mask)
    ]
