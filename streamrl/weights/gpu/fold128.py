"""fold128, digest_kind 1: the digest of a bucket that lives in the memory of a GPU. Pure.

Over the bucket as little-endian 32-bit words w_1, w_2, ... (zero padded at the end), both sums modulo 2^64:

    s1 = sum of w_i        s2 = sum of i * w_i        digest = s1 then s2, each as 8 little-endian bytes

Two integer sums in any order are the same number on every machine, so a device computes them as reductions, and the
pieces of a bucket can be summed apart and added. It finds data that is missing, torn, shifted or swapped; it is not a
cryptographic digest, and on a host it is slow: documents on a host keep digest_kind 0.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch

from streamrl.errors import WeightsError
from streamrl.messages import Layout

_MASK = (1 << 64) - 1
# A grid of rows: the index of a word splits into row and column, so no tensor of all indices is needed.
_ROW_WORDS = 1 << 12
_BLOCK_WORDS = _ROW_WORDS << 12
"""Words that are folded at once: 64 MiB, whose biased copy is the only temporary of that size."""


def pack(s1: int, s2: int) -> bytes:
    """The 16 bytes of a digest from its two sums, whatever their sign."""
    return struct.pack("<QQ", s1 & _MASK, s2 & _MASK)


def fold128(data: torch.Tensor) -> bytes:
    """16 bytes for a uint8 tensor [n] on any device; waits for the device."""
    return pack(*fold_sums(data).tolist())


def fold_sums(data: torch.Tensor, first_byte: int = 0) -> torch.Tensor:
    """(s1, s2) of bytes that begin at `first_byte` of their bucket: int64 [2] on their device, not waited for.

    Args:
        data: uint8 [n], contiguous.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    lead = min(-first_byte % 4, data.numel())
    if lead:  # they end a word that other bytes began
        sums += _one_word(data[:lead], first_byte // 4 + 1, at=first_byte % 4)
    word = (first_byte + lead) // 4
    body = data[lead:]
    num_words = body.numel() // 4
    if num_words:
        aligned = body[: 4 * num_words]
        if aligned.data_ptr() % 4:
            # A view as int32 needs an address divisible by 4.
            aligned = aligned.clone()
        words = aligned.view(torch.int32)
        for start in range(0, num_words, _BLOCK_WORDS):
            sums += _fold_words(words[start : start + _BLOCK_WORDS], word + start)
    if body.numel() > 4 * num_words:
        sums += _one_word(body[4 * num_words :], word + num_words + 1)
    return sums


def _one_word(data: torch.Tensor, index: int, at: int = 0) -> torch.Tensor:
    """Both sums of up to four bytes of word `index`, from byte `at` of it on."""
    shifts = torch.arange(8 * at, 8 * (at + data.numel()), 8, device=data.device)
    word = (data.to(torch.int64) << shifts).sum()
    return torch.stack((word, word * index))


def _fold_words(words: torch.Tensor, before: int) -> torch.Tensor:
    """Both sums of int32 words that `before` words precede.

    A word with its highest bit flipped, read as signed, is the word minus 2^31. So the reductions read 32-bit numbers
    and accumulate in 64 bits, and the bias is added once; int64 arithmetic wraps, which is what modulo 2^64 asks for.
    """
    count = words.numel()
    rows, row = divmod(count, _ROW_WORDS)
    biased = words ^ (-(1 << 31))
    grid, rest = biased[: rows * _ROW_WORDS].view(rows, _ROW_WORDS), biased[rows * _ROW_WORDS :]
    device = words.device
    by_row = grid.sum(1, dtype=torch.int64)
    by_column = grid.sum(0, dtype=torch.int64)
    total = by_row.sum() + rest.sum(dtype=torch.int64)
    weighted = (by_row * (torch.arange(rows, device=device) * _ROW_WORDS)).sum()
    weighted += (by_column * torch.arange(1, _ROW_WORDS + 1, device=device)).sum()
    index = torch.arange(rows * _ROW_WORDS + 1, count + 1, device=device)
    weighted += (rest.to(torch.int64) * index).sum()
    s1 = total + _signed(count << 31)
    s2 = weighted + _signed((count * (count + 1) // 2) << 31) + s1 * before
    assert row == rest.numel()
    return torch.stack((s1, s2))


def _signed(number: int) -> int:
    """The same number modulo 2^64, as int64 holds it."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


class DocumentFold:
    """Digests of all buckets of a document whose bytes come piece by piece; waits for the device only at the end.

    Args:
        layout: its buckets are the units.
        device: where the bytes are.
    """

    def __init__(self, layout: Layout, device: Any) -> None:
        self._ends = list(accumulate(layout.bucket_bytes))
        self.sums = torch.zeros(len(layout.bucket_bytes), 2, dtype=torch.int64, device=device)
        """(s1, s2) of each bucket; sums of several folds of one document add up."""
        self._num_bytes = 0

    def append(self, data: torch.Tensor) -> None:
        """The document's next bytes, uint8 [n]."""
        self.add(data, self._num_bytes)

    def add(self, data: torch.Tensor, start: int) -> None:
        """The document's bytes from `start` on, uint8 [n]; each byte is given once."""
        if start + data.numel() > self._ends[-1]:
            raise WeightsError("more bytes were folded than the layout holds")
        self._num_bytes += data.numel()
        done, bucket = 0, bisect_right(self._ends, start)
        while done < data.numel():
            at = start + done
            step = min(data.numel() - done, self._ends[bucket] - at)
            first = at - (self._ends[bucket - 1] if bucket else 0)
            # Not waited for: a device folds while the next bytes arrive.
            self.sums[bucket] += fold_sums(data[done : done + step], first)
            done, bucket = done + step, bucket + 1

    def digests(self, sums: torch.Tensor | None = None) -> list[bytes]:
        """One digest per bucket; waits for the device.

        Args:
            sums: of all folds of the document, where this one has seen but a part.
        Raises:
            WeightsError: the document is not complete.
        """
        if sums is None and self._num_bytes != self._ends[-1]:
            seen = bisect_right(self._ends, self._num_bytes)
            raise WeightsError(f"only {seen} of {len(self._ends)} buckets were folded")
        return [pack(s1, s2) for s1, s2 in (self.sums if sums is None else sums).tolist()]
