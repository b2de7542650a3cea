"""How held groups become batches: dispatch order, a bounded look-ahead, and the hard check on age (L2).

Order of completion would void the lag bound and over-represent short answers, so it is not offered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from learner.hub.ledger.tables.actors import LedgerPart
from learner.hub.ledger.tables.filters import dropped_by
from learner.hub.ledger.tables.groups import GroupRecord, GroupState, HeldGroup
from learner.hub.ledger.tables.lifecycle import GROUPS
from streamrl.messages import Group, MemberStatus


@dataclass
class BatchCutter(LedgerPart):
    """From HELD to TRAINED."""

    # (version it trains at, groups) of each batch that was cut, oldest first
    in_flight: deque[tuple[int, list[GroupRecord]]] = field(default_factory=deque)
    looked_at: int = -1  # the last version that held groups were judged at
    counts_at_cut: Counter[str] = field(default_factory=Counter)  # of the newest batch

    def cut_batch(self, version: int) -> list[HeldGroup] | None:
        """Exactly B groups to be trained from this version on, in dispatch order, or None if they must be waited for.

        Groups too old for this version are sent back or dropped on the way, also when the cut has to wait. One batch
        may be cut ahead while another is in training; `version` is then the version that one will lead to. Raises
        ValueError: `version` is not the learner's, nor that of the next batch ahead.
        """
        self.check_version(version)
        # What came since the last look at this version was judged on arrival: until there are enough, nothing changes.
        if version == self.looked_at and self.groups.num(GroupState.HELD) < self.lag.rule.groups_per_batch:
            return None
        self.looked_at = version
        # L2 again: what was fresh on arrival has aged while it was held.
        for record in self.groups.in_state(GroupState.HELD):
            if self.lag.is_stale(record, version):
                self.lifecycle.expire_stale(record)
        batch: list[GroupRecord] = []
        for record in self.consumable():
            batch.append(record)
            if len(batch) == self.lag.rule.groups_per_batch:
                break
        else:
            return None  # all or nothing: a short batch would change the step's meaning
        for record in batch:
            self.groups.move(record, GroupState.IN_BATCH)
        self.in_flight.append((version, batch))
        self.counts_at_cut = self.counts.copy()
        held = [self.lag.held(record, version) for record in batch]
        self.counts["num_lag_violations"] += sum(self._num_violations(group) for group in held)
        return held

    def check_version(self, version: int) -> None:
        """Raise ValueError if no batch can be cut for this version now."""
        current = self.versions.current
        newest = self.in_flight[-1][0] + self.lag.rule.steps_per_batch if self.in_flight else current
        if not current <= version <= newest:
            raise ValueError(f"cut_batch({version}): the learner is at {current}, the next cut is at {newest}")

    def trained(self, version_after: int, skipped: bool, reason: str = "") -> None:
        """The oldest batch in flight is done: trained, which led to `version_after`, or skipped and quarantined.

        A batch counts all its optimizer steps, also those of them that were not finite; it is skipped if all were.
        """
        current, num_steps = self.versions.current, self.lag.rule.steps_per_batch
        if not self.in_flight:
            raise ValueError(f"trained({version_after}): no batch was cut")
        if version_after != current + (0 if skipped else num_steps):
            raise ValueError(f"trained({version_after}, skipped={skipped}) at version {current}")
        _, batch = self.in_flight.popleft()
        for record in batch:
            if skipped:
                # The step was not finite: what caused it is unknown, so none of these groups is tried again.
                self.counts["num_groups_quarantined"] += 1
                self.lifecycle.drop(record, "quarantined")
            else:
                self.counts["num_groups_trained"] += 1
                self.groups.settle(record, GroupState.TRAINED, reason)
        if not skipped:
            self.versions.advance(num_steps)

    def consumable(self) -> Iterator[GroupRecord]:
        """Held groups in dispatch order, as far as the window allows."""
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

    def _num_violations(self, group: HeldGroup) -> int:
        """Members with a token older than their group's bound, read from the frames themselves."""
        # On purpose this shares no code with acceptance or `lag_rule`: it is the proof that L2 works, and must stay 0.
        oldest = group.version + self.settings.lag.steps_per_batch - 1 - group.max_lag  # at the batch's last step
        num = 0
        for frame in group.frames:
            message = GROUPS.decode(frame)
            assert isinstance(message, Group)
            for member in message.members:
                if member.status == MemberStatus.ABORTED:
                    continue
                fresh = [
                    span.version >= oldest for span in member.versions
                    if any(span.start < stop and begin < span.end for begin, stop in member.mask)
                ]
                num += not (any(fresh) if self.settings.mode == "mask_old_tokens" else all(fresh))
        return num

    def why_waiting(self, now: float) -> str:
        """What the next batch waits for, as a sentence for a person."""
        have, needed = sum(1 for _ in self.consumable()), self.lag.rule.groups_per_batch
        if have >= needed:
            return "nothing: a batch can be cut"
        num_dropped, filters = dropped_by(self.counts, self.counts_at_cut)
        dropped = f", {num_dropped} more were dropped by {filters}" if num_dropped else ""
        lead = f"{have} of {needed} groups are there{dropped}; "
        open_states = (GroupState.READY, GroupState.LEASED)
        first = next((record for record in self.groups.in_order() if record.state in open_states), None)
        if first is None:
            return lead + self._why_nothing_is_out()
        done = f"{len(first.members)} of {self.settings.group_size} members done"
        group = f"group {first.group_id} (prompt {first.prompt_index}"
        if first.lease is None:
            return f"{lead}{group}, {done}) waits for an actor; {self._who()}"
        lease = first.lease
        held_for = f"for {now - lease.granted_at:.0f} s"
        return f"{lead}{group}, attempt {lease.attempt}) is with actor {lease.actor_id} {held_for}, {done}"

    def _why_nothing_is_out(self) -> str:
        if self.lag.num_free > 0:
            return f"{self.lag.num_free} more may be leased; {self._who()}"
        if self.settings.num_groups_total is not None and self.lag.capacity == self.settings.num_groups_total:
            return f"all {self.lag.capacity} groups of the run are trained or held: the run is over"
        return f"the lead of {self.lag.rule.eta} batches is used up until the next optimizer step"

    def _who(self) -> str:
        actors = sorted(self.actors.all(), key=lambda one: one.actor_id)
        if not actors:
            return "no actor is connected"
        names = []
        for actor in actors[:4]:
            has = f"with version {actor.installed} and {actor.train.free} free slots"
            names.append(f"{actor.actor_id} is {actor.state} "
                         + (has if actor.installed is not None else "and has no usable version yet"))
        more = f" and {len(actors) - 4} more actors" if len(actors) > 4 else ""
        return f"learner is at {self.versions.ref}; " + ", ".join(names) + more
