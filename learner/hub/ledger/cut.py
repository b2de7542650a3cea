"""Batches of held groups: dispatch order, a bounded look-ahead, and the hard check on age (L2).

Order of completion would void the lag bound and over-represent short answers, so it is not offered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from learner.hub.ledger.part import Part, Tables
from learner.hub.ledger.proof import LagProof
from learner.hub.ledger.tables.groups import GroupRecord, GroupState, HeldGroup


class BatchCutter(Part):
    """Takes groups from HELD to TRAINED."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.proof = LagProof(self.settings.lag.steps_per_batch, self.settings.mode == "mask_old_tokens")
        # (version it trains at, groups) of each batch that was cut, oldest first
        self.in_flight: deque[tuple[int, list[GroupRecord]]] = deque()
        self.looked_at = -1  # the last version that held groups were judged at
        self.counts_at_cut: Counter[str] = Counter()  # of the newest batch

    def cut_batch(self, version: int) -> list[HeldGroup] | None:
        """Cut exactly B groups to be trained from this version on, in dispatch order; None if they must be waited for.

        Groups too old for this version are sent back or dropped on the way, also when the cut has to wait. One batch
        may be cut ahead while another is in training; `version` is then the version that one will lead to. Raises
        ValueError: `version` is not the learner's, nor that of the next batch ahead.
        """
        self.check_version(version)
        # What came since the last look at this version was judged on arrival: until there are enough, nothing changes.
        if version == self.looked_at and self.groups.num(GroupState.HELD) < self.lag.num_to_cut:
            return None
        self.looked_at = version
        # L2 again: what was fresh on arrival has aged while it was held.
        for record in self.groups.in_state(GroupState.HELD):
            if self.lag.is_stale(record, version):
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
        for record in batch:
            self.groups.move(record, GroupState.IN_BATCH)
        self.in_flight.append((version, batch))
        self.counts_at_cut = self.counts.copy()  # `explain` tells what was dropped since
        held = [self.lag.held(record, version) for record in batch]
        self.counts["num_lag_violations"] += self.proof.num_violations(list(zip(batch, held, strict=True)))
        return held

    def check_version(self, version: int) -> None:
        """Raise ValueError if no batch can be cut for this version now."""
        current = self.versions.current
        newest = self.in_flight[-1][0] + self.lag.rule.steps_per_batch if self.in_flight else current
        if not current <= version <= newest:
            raise ValueError(f"cut_batch({version}): the learner is at {current}, the next cut is at {newest}")

    def trained(self, version_after: int, skipped: bool, reason: str = "") -> None:
        """End the oldest batch in flight: trained, which led to `version_after`, or skipped and quarantined.

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
