"""A store of ended calls in bounded memory: the oldest entries go first."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_ENTRIES = 1000
MAX_BYTES = 32 << 20


class Kept(Generic[K, V]):
    """The last entries by their keys, of at most `max_bytes` together; each names its own size."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: dict[K, tuple[V, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[V]:
        return iter([value for value, _ in self._entries.values()])

    def get(self, key: K) -> V | None:
        found = self._entries.get(key)
        return None if found is None else found[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        self.drop(key)
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while len(self._entries) > MAX_ENTRIES or self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes
