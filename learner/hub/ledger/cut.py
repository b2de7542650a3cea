"""Batches of held groups: dispatch order, a bounded look-ahead, and the hard check on age (L2).

Order of completion would void the lag bound and over-represent short answers, so it is not offered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from learner.hub.ledger.apply import commit
from learner.hub.ledger.lifecycle import GroupLifecycle
from learner.hub.ledger.plan import plan_batch
from learner.hub.ledger.state import Part, State
from learner.hub.ledger.tables.groups import GROUPS, GroupRecord, GroupState, HeldGroup
from streamrl.messages import Group, Member, MemberStatus
from streamrl.stream.records import BatchCut, StepTaken

FRAMES_EVERY = 16
"""Every so many batches, from the first on, one is read from its frames. The others go by the versions noted on
arrival, which takes a fifth of the time and none that grows with the length of answers."""


@dataclass
class LagProof:
    """Counts members with a token that is too old at the last optimizer step of their batch: proof that L2 works.

    It shares no code with acceptance or `lag_rule`, so that no mistake there can hide here. The count must stay 0.

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


class BatchCutter(Part):
    """Takes groups from HELD to TRAINED."""

    def __init__(self, state: State, lifecycle: GroupLifecycle) -> None:
        super().__init__(state)
        self.lifecycle = lifecycle
        self.proof = LagProof(self.settings.lag.steps_per_batch, self.settings.mode == "mask_old_tokens")
        self.newest: BatchCut | None = None
        self.looked_at = -1  # the last version that held groups were judged at
        self.counts_at_cut: Counter[str] = Counter()  # of the newest batch

    def cut_batch(
        self, version: int, dp_ranks: Sequence[int] = (0,), num_minibatches: int = 1
    ) -> list[HeldGroup] | None:
        """Cut exactly B groups to be trained from this version on, in dispatch order; None if they must be waited for.

        Groups too old for this version are sent back or dropped on the way, also when the cut has to wait. One batch
        may be cut ahead while another is in training; `version` is then the version that one will lead to. `newest` is
        its record, with the plan for these ranks. Raises ValueError: `version` is not the learner's, nor that of the
        next batch ahead; or the batch cannot be divided so.
        """
        self.check_version(version)
        # What came since the last look at this version was judged on arrival: until there are enough, nothing changes.
        if version == self.looked_at and self.groups.num(GroupState.HELD) < self.lag.num_to_cut:
            return None
        self.looked_at = version
        # L2 again: what was fresh on arrival has aged while it was held.
        for record in self.lag.stale_held(version):
            self.lifecycle.expire_stale(record)
        if self.groups.num(GroupState.HELD) < self.lag.num_to_cut:
            return None
        batch: list[GroupRecord] = []
        for record in self.consumable():
            batch.append(record)
            if len(batch) == self.lag.rule.groups_per_batch:
                break
        else:
            return None  # all or nothing: a short batch would change the step's meaning
        held = [self.lag.held(record, version) for record in batch]
        plan = tuple(plan_batch(held, max(dp_ranks) + 1, num_minibatches))
        frames = tuple(one for group in held for one in group.sequences)
        self.newest = BatchCut(version, plan, frames, tuple(dp_ranks), num_minibatches)
        commit(self.state, self.newest)
        self.counts_at_cut = self.counts.copy()  # `explain` tells what was dropped since
        self.counts["num_lag_violations"] += self.proof.num_violations(list(zip(batch, held, strict=True)))
        return held

    def check_version(self, version: int) -> None:
        """Raise ValueError if no batch can be cut for this version now."""
        current = self.versions.current
        flight = self.state.in_flight
        newest = flight[-1][0] + self.lag.rule.steps_per_batch if flight else current
        if not current <= version <= newest:
            raise ValueError(f"cut_batch({version}): the learner is at {current}, the next cut is at {newest}")

    def end_batch(self, step: StepTaken) -> None:
        """End the oldest batch in flight: trained, or skipped and quarantined; its bounds hold from now on.

        A batch counts all its optimizer steps, also those of them that were not finite; it is skipped if all were.
        Raises ValueError: there is none, its version is another, or the bounds contradict themselves.
        """
        commit(self.state, step)

    def consumable(self) -> Iterator[GroupRecord]:
        """Yield held groups in dispatch order, as far as the window allows."""
        # The oldest open group that is not held has been overtaken by more groups than any other open one, because
        # whatever passes a younger group passes it too. So it alone decides.
        num_overtaken: int | None = None
        for record in self.groups.in_order():
            if record.state is GroupState.HELD:
                if num_overtaken is not None:
                    num_overtaken += 1
                    if not self.lag.rule.may_overtake(num_overtaken):
                        return
                yield record
            elif record.state is not GroupState.IN_BATCH and num_overtaken is None:
                num_overtaken = self.groups.num_consumed_after(record.group_id)
