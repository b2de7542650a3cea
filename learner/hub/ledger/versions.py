"""Which weights exist on this history, and how many batches each of them has seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from streamrl.messages import Lineage, VersionRef

MAX_LINEAGE = 1024
MAX_ENDS = 1024


class Versions:
    """The learner's version, the surviving lineage, and the clock that turns versions into batches.

    Args:
        learner_epoch: of this start.
        version: optimizer steps done.
        lineage: earlier epochs, already cut to `version`.
        num_batches: batches trained so far.
    """

    def __init__(self, learner_epoch: int, version: int, lineage: Sequence[Lineage], num_batches: int) -> None:
        self.learner_epoch = learner_epoch
        self.current = version
        self.num_batches = num_batches
        self._past = {entry.learner_epoch: entry for entry in lineage[-(MAX_LINEAGE - 1) :]}
        self._first = version
        self._last = version  # published or trained, whichever is later
        self._ends: list[int] = []  # versions at which a batch ended, oldest first
        self._ends_from = (version, num_batches)  # what was so before the first of them

    @property
    def ref(self) -> VersionRef:
        return VersionRef(self.learner_epoch, self.current)

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """Every epoch's versions that lie on this history, the present epoch last."""
        return (*self._past.values(), Lineage(self.learner_epoch, self._first, self._last))

    def known(self, learner_epoch: int, version: int) -> bool:
        """Whether these weights lie on the surviving history; the future and dead branches do not."""
        if learner_epoch == self.learner_epoch:
            return self._first <= version <= self._last
        entry = self._past.get(learner_epoch)
        return entry is not None and entry.first <= version <= entry.last

    def published(self, ref: VersionRef) -> None:
        """A version was announced: tokens of it are welcome even before its batch is reported as trained."""
        if ref.learner_epoch != self.learner_epoch or ref.version < self._last:
            raise ValueError(f"published {ref} after {self.learner_epoch}:{self._last}: versions only go up")
        self._last = ref.version

    def advance(self, version: int) -> None:
        """A batch was trained and led to this version."""
        self.current = version
        self._last = max(self._last, version)
        self.num_batches += 1
        self._ends.append(version)
        if len(self._ends) > MAX_ENDS:
            self._ends_from = (self._ends.pop(0), self._ends_from[1] + 1)

    def batches_at(self, version: int) -> int:
        """Batches that these weights have been trained on; never too high, exact unless very old.

        With one optimizer step a batch it is the version itself.
        """
        start, num_batches = self._ends_from
        if version < start:
            return num_batches - (start - version)
        return num_batches + bisect_right(self._ends, version)

    def oldest_useful(self, max_lag: int) -> VersionRef:
        """The smallest known version that is inside the lag bound now."""
        oldest = max(0, self.current - max_lag)
        for entry in self.lineage:
            if entry.first <= entry.last and entry.last >= oldest:
                return VersionRef(entry.learner_epoch, max(entry.first, oldest))
        return self.ref


def cut_lineage(lineage: Sequence[Lineage], version: int) -> tuple[Lineage, ...]:
    """The lineage of a run that resumes from `version`: later versions are a dead branch."""
    return tuple(Lineage(entry.learner_epoch, entry.first, min(entry.last, version)) for entry in lineage)
