"""Sources of a sweep's jobs: a list made beforehand, or a search that learns from each (`study.Search`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Source(Protocol):
    """Jobs one by one, by their numbers; the results reported so far may decide which one follows."""

    def next(self) -> tuple[int, tuple[str, ...]] | None:
        """Number of the next job and the words that are its own; None when there are no more."""

    def should_prune(self, number: int, step: int, value: float) -> bool:
        """Whether a job with this value at this step is to be stopped."""

    def tell(self, number: int, value: float | None, *, pruned: bool) -> None:
        """A job has ended; without a value it has failed."""


class Grid:
    """Every combination once; none is pruned."""

    def __init__(self, combinations: Sequence[Sequence[str]]) -> None:
        self._left = [(number, tuple(words)) for number, words in enumerate(combinations)]

    def next(self) -> tuple[int, tuple[str, ...]] | None:
        return self._left.pop(0) if self._left else None

    def should_prune(self, number: int, step: int, value: float) -> bool:
        return False

    def tell(self, number: int, value: float | None, *, pruned: bool) -> None:
        pass
