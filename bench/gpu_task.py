"""A task for runs with random weights: the reward of a text is a number drawn from it, so that groups differ."""

from __future__ import annotations

from zlib import crc32


def record(split: str, index: int) -> dict[str, str]:
    """A prompt of 40 to 140 letters."""
    return {"prompt": "abcdefghij"[index % 10] * (40 + index % 101)}


def reward(record: dict[str, str], completion: str) -> float:
    """0 to 1."""
    return crc32(completion.encode()) % 1000 / 1000
