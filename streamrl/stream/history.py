"""What a run did, read from its log: the batches that its weights were trained on, in order, and their versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import ControlError
from streamrl.messages import Manifest
from streamrl.metrics.run_record import starts_of
from streamrl.stream.records import (
    BatchCut,
    Evaluated,
    GroupArrived,
    GroupMoved,
    LogError,
    RunStarted,
    StepTaken,
    VersionPublished,
    decode,
)
from streamrl.stream.segments import FOLDER, Place, read_at, scan, segments

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
        evaluated: (version, evaluation set) of evaluations that ended.
        first: the number of the first record that was read.
    """

    run_dir: Path | str
    first: int = 1
    starts: list[RunStarted] = field(default_factory=list)
    batches: list[LoggedBatch] = field(default_factory=list)
    published: dict[int, Manifest] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    evaluated: set[tuple[int, str]] = field(default_factory=set)
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
                case BatchCut() as cut:
                    history.batches.append(LoggedBatch(place.sequence, cut))
                case StepTaken() as step:
                    history._ended(place, step)
                case GroupMoved(group_id=group_id, state=state, reason=reason) if state == DROPPED:
                    history.dropped[group_id] = reason
                case VersionPublished(manifest=manifest):
                    history.published[manifest.ref.version] = manifest
                case Evaluated(version=version, dataset=dataset):
                    history.evaluated.add((version, dataset))
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
