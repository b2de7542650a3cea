"""The order of prompts: endless, seeded and resumable, over the records of a task.

The n-th draw is a pure function of (seed, n): a group's prompt follows from its number.
A pass visits every record once, in the order of a keyed permutation that is computed, never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from streamrl.errors import DataChangedError, TaskError
from streamrl.messages.seeding import mix64

_ROUNDS = 6
NUM_FIRST = 256
"""So many bad records end a run that has had no good one: a task may have more than can be gone through."""


def permuted(index: int, size: int, key: int) -> int:
    """Map `index` by a keyed permutation of 0..size-1."""
    # A Feistel network over the smallest even number of bits that holds `size`, walked until it lands inside: at most
    # four steps on average, because that domain is less than four times `size`.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low_mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & low_mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix64(key, turn, right) & low_mask)
        index = left << half | right
        if index < size:
            return index


class Prompt(NamedTuple):
    """One draw: the record, and how many full passes over the data came before."""

    prompt_index: int
    pass_index: int


class PromptStream:
    """The order of prompts.

    Args:
        num_records: size of the split, at least 1.
        seed: of the order.
        record: index -> the record as JSON bytes. Raises TaskError for one that cannot be leased.
        shuffle: False draws 0, 1, 2, ... in every pass.
    Example:
        PromptStream(3, 0, record, shuffle=False) has (0, 0), (1, 0), (2, 0), (0, 1), ... at 0, 1, 2, 3, ...
    """

    def __init__(
        self, num_records: int, seed: int, record: Callable[[int], bytes], *, shuffle: bool = True
    ) -> None:
        if num_records < 1:
            raise ValueError(f"num_records={num_records}: a task needs at least one training record")
        self.num_records = num_records
        self.record = record
        self._seed = seed
        self._shuffle = shuffle
        self._num_in_a_row, self._max_in_a_row = 0, min(num_records, NUM_FIRST)
        self.fatal = ""
        self.tell: Callable[[str], None] = lambda text: None
        """Called for every record that is passed over."""

    def read(self, index: int) -> bytes | None:
        """Read the record for a lease; None for one that is passed over. `fatal` says if none is left to lease."""
        try:
            record = self.record(index)
        except TaskError as error:
            self._num_in_a_row += 1
            if isinstance(error, DataChangedError):
                self.fatal = f"the run stops: {error}"
            elif self._num_in_a_row >= self._max_in_a_row:
                self.fatal = (
                    f"{self._num_in_a_row} records in a row were skipped, so the run stops: none are left, or none "
                    f"could be used from the start. The last: {error}"
                )
            self.tell(f"this record is skipped: {error}")
            return None
        self._num_in_a_row, self._max_in_a_row = 0, self.num_records
        return record

    def at(self, position: int) -> Prompt:
        """The draw at a position; a pure function."""
        pass_index, index = divmod(position, self.num_records)
        if self._shuffle:
            index = permuted(index, self.num_records, mix64(self._seed, pass_index))
        return Prompt(index, pass_index)
