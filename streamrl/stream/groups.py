"""The groups of a log as rows: what became of each, and which of them a reader asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamrl.messages import TO_HUB, Group, Member, MemberStatus
from streamrl.messages.codec import Decoder
from streamrl.stream.history import History
from streamrl.stream.records import GroupArrived, Record
from streamrl.stream.segments import read_records

OUTCOMES = ("accepted", "stale", "dropped")
MAX_FRAME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A GROUP message, and what became of it.

    Attributes:
        group: None if its frame was not kept.
        trained_at: the version of the batch that it was trained in; -1 if it was not.
    """

    sequence: int
    arrived: GroupArrived
    group: Group | None
    outcome: str
    reason: str
    trained_at: int

    @property
    def members(self) -> list[Member]:
        """Those with an answer."""
        found = self.group.members if self.group is not None else ()
        return [one for one in found if one.status != MemberStatus.ABORTED]

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest version that sampled a token of it."""
        found = [span.version for member in self.members for span in member.versions]
        return (min(found), max(found)) if found else None

    @property
    def reward(self) -> float | None:
        """Mean reward of its answers."""
        found = [member.reward for member in self.members]
        return sum(found) / len(found) if found else None

    def prompt_ids(self, member: Member) -> bytes:
        """Equal prompts are sent once, with the first member."""
        return member.prompt_ids or self.members[0].prompt_ids


@dataclass(frozen=True, slots=True)
class Wanted:
    """A selection of groups; None does not select.

    Attributes:
        versions: some token was sampled by one of these.
        rewards: the mean reward of the group's answers lies between these.
    """

    versions: tuple[int, int] | None = None
    actor: str | None = None
    outcome: str | None = None
    rewards: tuple[float, float] | None = None

    def takes(self, one: LoggedGroup) -> bool:
        if self.actor not in (None, one.arrived.actor_id) or self.outcome not in (None, one.outcome):
            return False
        if self.versions is not None:
            found = one.versions
            if found is None or found[1] < self.versions[0] or found[0] > self.versions[1]:
                return False
        if self.rewards is not None:
            return one.reward is not None and self.rewards[0] <= one.reward <= self.rewards[1]
        return True


def rows(run_dir: Path | str, wanted: Wanted) -> Iterator[tuple[int, Record | LoggedGroup]]:
    """(sequence, record) of a log in order; a group as what became of it, which later records tell, if it is wanted.

    Raises:
        LogError: the log is damaged.
        WireError: the frame of a group cannot be read.
    """
    history = History.read(run_dir)
    trained = {
        sequence: batch.cut.version for batch in history.batches if batch.trained for sequence in batch.cut.frames
    }
    decoder = Decoder(TO_HUB, MAX_FRAME_BYTES)
    for sequence, record in read_records(run_dir, history.first):
        if not isinstance(record, GroupArrived):
            yield sequence, record
            continue
        group = decoder.decode(record.frame) if record.frame else None
        assert group is None or isinstance(group, Group)
        trained_at, outcome, reason = trained.get(sequence, -1), "accepted", ""
        if record.refused:
            outcome, reason = "stale", record.refused
        elif trained_at < 0 and record.group_id in history.dropped:
            outcome, reason = "dropped", history.dropped[record.group_id]
        if wanted.takes(found := LoggedGroup(sequence, record, group, outcome, reason, trained_at)):
            yield sequence, found
