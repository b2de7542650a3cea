"""The history of a run, read from its log: its trained batches in order, their versions, and the end of every group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.errors import ControlError
from streamrl.messages import FINISHED_AT, TO_HUB, Group, Manifest, Member, MemberStatus
from streamrl.messages.codec import Decoder
from streamrl.messages.validate import sound
from streamrl.metrics.run_record import starts_of
from streamrl.stream.records import (
    BatchCut,
    GroupArrived,
    GroupMoved,
    LogError,
    Record,
    RunStarted,
    StepTaken,
    VersionPublished,
    decode,
)
from streamrl.stream.segments import FOLDER, Place, read_at, read_records, scan, segments

DROPPED = 5
"""State of a group that the ledger has dropped."""


@dataclass(slots=True)
class LoggedBatch:
    """A batch that was handed to the learner, and how it ended; `step` is None if the log ends before that."""

    sequence: int
    cut: BatchCut
    step: StepTaken | None = None

    @property
    def trained(self) -> bool:
        """Whether the ranks computed a step on it, as far as is known; else it was set aside."""
        return self.step is None or self.step.trained


@dataclass
class History:
    """The surviving history of a run: what a start from an older version has left behind is not in it.

    Attributes:
        published: manifests by version, of the last that was published under each.
        dropped: groups that were, with the reason.
        first: the number of the first record that was read.
        begun: the numbers of the records of `starts`.
    """

    run_dir: Path | str
    first: int = 1
    starts: list[RunStarted] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    batches: list[LoggedBatch] = field(default_factory=list)
    published: dict[int, Manifest] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    _places: dict[int, Place] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path | str, first: int | None = None) -> History:
        """Read a log from a record on, by default from the first after which none is missing; frames stay in the
        files.

        Raises:
            ControlError: the run has no log.
            LogError: it is damaged.
        """
        if first is None:
            if not (files := segments(run_dir)):
                raise ControlError(f"{run_dir} {_why_no_log(Path(run_dir))}")
            first = next((one.first for one in reversed(files) if one.previous != one.first), files[0].first)
        history = cls(run_dir, first)
        for place, view in scan(run_dir, first):
            if place.kind == GroupArrived.KIND:
                history._places[place.sequence] = place
                continue
            match decode(view, place.form, place):
                case RunStarted() as start:
                    history._started(start)
                    history.begun.append(place.sequence)
                case BatchCut() as cut:
                    history.batches.append(LoggedBatch(place.sequence, cut))
                case StepTaken() as step:
                    history._ended(place, step)
                case GroupMoved(group_id=group_id, state=state, reason=reason) if state == DROPPED:
                    history.dropped[group_id] = reason
                case VersionPublished(manifest=manifest):
                    history.published[manifest.ref.version] = manifest
        return history

    def trained(self, first: int = 0, last: int | None = None) -> list[LoggedBatch]:
        """The trained batches for the versions from `first` up to `last`. Raises ControlError: there is none."""
        found = [
            one for one in self.batches
            if one.trained and one.cut.version >= first and (last is None or one.cut.version < last)
        ]
        if not found:
            there = [one.cut.version for one in self.batches]
            raise ControlError(
                f"no batch of {self.run_dir} is for a version from {first} on"
                + (f" and before {last}" if last is not None else "")
                + (f": its log has those for {min(there)} to {max(there)}" if there else ": its log has none")
            )
        return found

    def settings(self) -> dict[int, dict[str, Any]]:
        """The plain settings of its starts, by the version from which on each trained."""
        found: dict[int, str] = {}
        for start in self.starts:
            begun = start.version if start.again_from < 0 else start.again_from
            found = {version: one for version, one in found.items() if version < begun} | {begun: start.settings}
        return {version: json.loads(text) for version, text in found.items()}

    def _started(self, start: RunStarted) -> None:
        self.starts.append(start)
        self.batches = [one for one in self.batches if _survives(one, start.version)]
        self.published = {version: one for version, one in self.published.items() if version <= start.version}

    def _ended(self, place: Place, step: StepTaken) -> None:
        batch = next((one for one in self.batches if one.step is None), None)
        if batch is not None:  # else it was cut before the first record that is read
            batch.step = step
        elif self.first == 1:
            raise LogError(f"{place.path}, byte {place.at}: a step ends no batch that was cut")

    def arrivals(self, batch: LoggedBatch) -> list[GroupArrived]:
        """The GROUP messages of a batch, in its order. Raises LogError: the log holds them no more."""
        self._find(batch.cut.frames)
        found = [read_at(self._places[sequence]) for sequence in batch.cut.frames]
        return [one for one in found if isinstance(one, GroupArrived)]

    def _find(self, sequences: Sequence[int]) -> None:
        """Look for records before the first that was read: of groups that arrived before a checkpoint."""
        missing = {one for one in sequences if one not in self._places}
        if not missing:
            return
        for place, _ in scan(self.run_dir, min(missing), complete_from=self.first):
            if place.sequence >= self.first:
                break
            if place.kind == GroupArrived.KIND:
                self._places[place.sequence] = place
        lost = sorted(missing - self._places.keys())
        if lost:
            raise LogError(
                f"the log of {self.run_dir} does not hold record {lost[0]} any more, of which a batch needs the frame: "
                "its files were removed (stream.keep, stream.max_gb)"
            )


def _why_no_log(run_dir: Path) -> str:
    """The end of a sentence that begins with the run."""
    words = str(next((one.get("command", "") for one in reversed(starts_of(run_dir))), "")).split()
    if len(words) > 1 and words[1] in ("sft", "dpo", "train-reward-model"):
        return f"keeps no log: a run of streamrl {words[1]} has none; its metrics are in {run_dir}/metrics.jsonl"
    return f"has no log: its folder {FOLDER}/ was removed or left behind, or it was made by an earlier release"


def _survives(batch: LoggedBatch, version: int) -> bool:
    """Whether a start that begins with this version has trained the batch, or was the one to skip it there."""
    skipped = batch.cut.version == version and (batch.step is None or batch.step.version == version)
    return batch.cut.version < version or skipped


# --- groups as rows ---------------------------------------------------------------------------------------------------


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
        """The members with an answer."""
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

    @property
    def finished_at(self) -> float | None:
        """Seconds since 1970 by the clock of its actor; None if it did not say."""
        return sound(self.group.stats).get(FINISHED_AT) if self.group is not None else None

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
