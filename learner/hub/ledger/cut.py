"""How held groups become batches: dispatch order, a bounded look-ahead, and the hard check on age (L2).

Completion order would void the lag bound and over-represent short answers, so it is not offered.
"""

from __future__ import annotations

from collections.abc import Iterator

from learner.hub.ledger.groups import GroupRecord, GroupState, HeldGroup
from learner.hub.ledger.state import Books, CutBatch
from streamrl.messages import TO_HUB, Group, MemberStatus
from streamrl.messages.codec import Decoder

_GROUPS = Decoder({4: TO_HUB[4]}, max_bytes=1 << 32)


class Consumption(Books):
    """From HELD to TRAINED."""

    def cut_batch(self, version: int) -> list[HeldGroup] | None:
        """Exactly B groups to be trained at this version, in dispatch order, or None if they must be waited for.

        Groups too old for this version are sent back or dropped on the way, also when the cut has to wait. One batch
        may be cut ahead while another is in training; `version` is then the version that one will lead to.

        Raises:
            ValueError: `version` is not the learner's, nor that of the next batch ahead.
        """
        newest = self.version if not self._batches else self._batches[-1].version + self.settings.versions_per_batch
        if not self.version <= version <= newest:
            raise ValueError(f"cut_batch({version}): the learner is at {self.version}, the next cut is at {newest}")
        for group_id in self.groups.ids(GroupState.HELD):
            record = self.groups.live[group_id]
            if any(self._is_stale(record, facts, version) for facts in record.members.values()):
                self._stale(record)
        batch = []
        for record in self._consumable():
            batch.append(record)
            if len(batch) == self.settings.groups_per_batch:
                break
        else:
            return None
        for record in batch:
            self.groups.move(record, GroupState.IN_BATCH)
        self._batches.append(CutBatch(version, [record.group_id for record in batch]))
        held = [self._as_held(record, version) for record in batch]
        self._counts["num_lag_violations"] += sum(self._num_violations(group) for group in held)
        return held

    def trained(self, version_after: int, skipped: bool, reason: str = "") -> None:
        """The oldest batch in flight is done: trained, which led to `version_after`, or skipped and quarantined."""
        if not self._batches:
            raise ValueError(f"trained({version_after}): no batch was cut")
        most = self.version + self.settings.versions_per_batch
        if not (version_after == self.version if skipped else self.version < version_after <= most):
            raise ValueError(f"trained({version_after}, skipped={skipped}) at version {self.version}, {most} at most")
        batch = self._batches.popleft()
        for group_id in batch.group_ids:
            if skipped:
                self._counts["num_groups_quarantined"] += 1
                self._drop(self.groups.live[group_id], "quarantined")
            else:
                self._counts["num_groups_trained"] += 1
                self._end(self.groups.live[group_id], GroupState.TRAINED, reason)
        if not skipped:
            self.versions.advance(version_after)

    def why_waiting(self, now: float) -> str:
        """Whom the next batch waits for, as a sentence for a person."""
        needed = self.settings.groups_per_batch
        have = sum(1 for _ in self._consumable())
        if have >= needed:
            return "nothing: a batch can be cut"
        lead = f"{have} of {needed} groups are there; "
        out = (GroupState.READY, GroupState.LEASED)
        first = next((record for record in self.groups.in_order() if record.state in out), None)
        if first is None:
            return lead + self._why_nothing_is_out()
        done = f"{len(first.members)} of {self.settings.group_size} members done"
        if first.lease is not None:
            age = now - first.lease.granted_at
            return lead + (
                f"group {first.group_id} (prompt {first.prompt_index}, attempt {first.lease.attempt}) is with actor "
                f"{first.lease.actor_id} for {age:.0f} s, {done}"
            )
        return lead + f"group {first.group_id} (prompt {first.prompt_index}, {done}) waits for an actor; {self._who()}"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _consumable(self) -> Iterator[GroupRecord]:
        """Held groups in dispatch order, as far as the window allows.

        The oldest open group that is not held has been overtaken by more groups than any other open one, because
        whatever passes a younger group passes it too. So it alone decides.
        """
        num_passed: int | None = None  # by how many groups the oldest gap has been, or will have been, overtaken
        for record in self.groups.in_order():
            if record.state is GroupState.HELD:
                if num_passed is not None:
                    num_passed += 1
                    if num_passed > self.settings.window:
                        return
                yield record
            elif record.state is not GroupState.IN_BATCH and num_passed is None:
                num_passed = self.groups.num_consumed_after(record.group_id)

    def _num_violations(self, group: HeldGroup) -> int:
        """Members with a token older than their group's bound, read from the frames themselves.

        On purpose this shares no code with admission: it is the proof that L2 works, and must stay 0.
        """
        oldest = group.version - group.max_lag
        num = 0
        for frame in group.frames:
            message = _GROUPS.decode(frame)
            assert isinstance(message, Group)
            for member in message.members:
                if member.status == MemberStatus.ABORTED:
                    continue
                ages = [
                    span.version >= oldest
                    for span in member.versions
                    if any(span.start < stop and begin < span.end for begin, stop in member.mask)
                ]
                num += not (any(ages) if self.settings.mode == "mask_old_tokens" else all(ages))
        return num

    def _why_nothing_is_out(self) -> str:
        if self.groups.num_live() < self.capacity:
            return f"{self.capacity - self.groups.num_live()} more may be leased; {self._who()}"
        if self.settings.num_groups_total is not None and self.capacity == self.settings.num_groups_total:
            return f"all {self.capacity} groups of the run are trained or held: the run is over"
        return f"the lead of {self.eta} batches is used up until the next optimizer step"

    def _who(self) -> str:
        if not self.actors:
            return "no actor is linked"
        names = []
        for actor in sorted(self.actors.values(), key=lambda one: one.actor_id)[:4]:
            has = f"version {actor.installed}" if actor.installed is not None else "no usable version"
            names.append(f"{actor.actor_id} is {actor.state} with {has} and {actor.free} free slots")
        more = f" and {len(self.actors) - 4} more actors" if len(self.actors) > 4 else ""
        return f"learner is at {self.versions.ref}; " + ", ".join(names) + more
