"""Lossless encoding of what changed between two versions of a bucket, as new values over old ones. Pure.

A bucket is a sequence of little-endian words of 2 or 4 bytes. The encoded form holds the distances between changed
words and their new values, never a difference or an XOR, so that applying a repeated delivery is harmless.

    header   64 bytes: magic, word size, bucket size, counts, sizes, digest of the base, digest of the target
    codes    u16, zstd: g < 65535 "pass over g words, then comes a value"; 65535 "pass over 65,535 words, no value"
    values   u16 or u32, zstd: the new words, in order
    tail     the bucket's last bytes that do not fill a word, as they are

A delta is untrusted: sizes are bounded by the bucket before memory is taken, the base must be the one that was encoded
against, and the result must have the target's digest.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import zstandard

from streamrl.errors import WeightsError
from streamrl.messages import Layout
from streamrl.weights.manifest import DTYPE_BYTES, bucket_digest, tensor_nbytes

SKIP = 65535
# The fastest level: the hub's socket thread encodes between two answers, and receivers wait for it.
ZSTD_LEVEL = 1
HEADER_BYTES = 64
_MAGIC = b"SRD1"
_HEADER = struct.Struct("<4sB3xQIIII16s16s")
assert _HEADER.size == HEADER_BYTES
_WORDS = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_PIECE_BYTES = 1 << 20  # compared at once: both sides and the mask stay in the cache
_HOPELESS = 2.0  # compression of random values and short gaps never halves them

Buffer = bytes | bytearray | memoryview


class DeltaError(WeightsError):
    """A delta that does not turn this base into that target."""


class _Header(NamedTuple):
    magic: bytes
    word_bytes: int
    nbytes: int
    num_codes: int
    num_values: int
    codes_nbytes: int
    values_nbytes: int
    base: bytes
    target: bytes


def word_bytes_of(layout: Layout) -> int:
    """2 where most bytes are of elements of at most two, else 4: a few wide buffers lie among narrow weights."""
    wide = sum(tensor_nbytes(spec) for spec in layout.tensors if DTYPE_BYTES[spec.dtype] > 2)
    return 4 if 2 * wide > sum(layout.bucket_bytes) else 2


def max_encoded(nbytes: int) -> int:
    """Largest delta of a bucket of so many bytes: every word changed, and compression made it worse."""
    # A code and a value per word are at most twice the bytes (words of 2 bytes); the rest is for zstd's frames.
    return HEADER_BYTES + 1024 + 2 * nbytes + nbytes // 32


def encode(
    old: Buffer, new: Buffer, word_bytes: int, *, base_digest: bytes | None = None, target_digest: bytes | None = None,
    max_nbytes: int | None = None,
) -> bytes | None:
    """The delta that turns `old` into `new`, one bucket at two versions.

    Args:
        word_bytes: 2 or 4.
        base_digest, target_digest: their `bucket_digest`s, where they are known already.
        max_nbytes: return None when the encoded form is larger; found out early if most has changed.
    Raises:
        DeltaError: the two sizes differ, or the word size is none.
    """
    if len(old) != len(new) or word_bytes not in _WORDS:
        raise DeltaError(
            f"a delta is made of two equally long buckets in words of 2 or 4 bytes, got {len(old)} and {len(new)} "
            f"bytes in words of {word_bytes}"
        )
    body = len(new) - len(new) % word_bytes
    # A changed word costs a code of 2 bytes and a value: beyond this count compression cannot reach max_nbytes.
    limit = None if max_nbytes is None else int(_HOPELESS * max_nbytes) // (2 + word_bytes)
    positions = _changed_words(old, new, word_bytes, limit)
    if positions is None:
        return None
    # Values rather than differences or an XOR: applying them twice gives the same bucket.
    values = np.frombuffer(new, _WORDS[word_bytes], body // word_bytes)[positions]
    codes = _codes(positions)
    packed_codes, packed_values = _pack(codes), _pack(values)
    header = _Header(
        _MAGIC, word_bytes, len(new), len(codes), len(values), len(packed_codes), len(packed_values),
        base_digest or bucket_digest(old), target_digest or bucket_digest(new),
    )
    payload = b"".join((_HEADER.pack(*header), packed_codes, packed_values, memoryview(new)[body:]))
    return payload if max_nbytes is None or len(payload) <= max_nbytes else None


def apply(payload: Buffer, base: Buffer, target: memoryview, *, base_digest: bytes, target_digest: bytes) -> None:
    """Write the new bucket into `target`, from `base` and an untrusted delta; `base` is only read.

    Args:
        base: a bucket that was verified to have `base_digest`.
        target: writable, as long as `base`; undefined after an error.
        target_digest: of the new bucket, from the manifest.
    Raises:
        DeltaError: made for another base or another target, malformed, or the result is not the target.
    """
    header = _read_header(payload, len(base), base_digest, target_digest)
    word = _WORDS[header.word_bytes]
    codes_end = HEADER_BYTES + header.codes_nbytes
    values_end = codes_end + header.values_nbytes
    view = memoryview(payload)
    codes = np.frombuffer(_unpack(view[HEADER_BYTES:codes_end], 2 * header.num_codes), np.dtype("<u2"))
    values = np.frombuffer(_unpack(view[codes_end:values_end], word.itemsize * header.num_values), word)
    num_words = len(base) // word.itemsize
    positions = _positions(codes)
    # Positions ascend, so the last one bounds them all.
    if len(positions) != len(values) or (len(positions) and positions[-1] >= num_words):
        last = int(positions[-1]) if len(positions) else -1
        raise DeltaError(
            f"the delta names {len(positions)} words, the last at {last} of {num_words}, and has {len(values)} values: "
            "it is malformed"
        )
    # The base serves as the current version meanwhile, so it is copied and never written.
    target[:] = base
    np.frombuffer(target, word, num_words)[positions] = values
    target[num_words * word.itemsize :] = view[values_end:]
    # The header's digests come from the sender as well; only this one, from the manifest, proves the result.
    if bucket_digest(target) != target_digest:
        raise DeltaError(f"the delta leads to another bucket than {target_digest.hex()[:8]}: it was damaged")


def _read_header(payload: Buffer, nbytes: int, base_digest: bytes, target_digest: bytes) -> _Header:
    if len(payload) < HEADER_BYTES:
        raise DeltaError(f"a delta has a header of {HEADER_BYTES} bytes, this one has {len(payload)} bytes")
    header = _Header(*_HEADER.unpack_from(payload))
    if header.magic != _MAGIC or header.word_bytes not in _WORDS or header.nbytes != nbytes:
        raise DeltaError(
            f"no delta of a bucket of {nbytes} bytes: magic {header.magic!r}, words of {header.word_bytes}, "
            f"bucket of {header.nbytes} bytes"
        )
    if header.base != base_digest:
        raise DeltaError(
            f"wrong base: the delta starts from bucket {header.base.hex()[:8]}, this side holds "
            f"{base_digest.hex()[:8]}; take the full version"
        )
    if header.target != target_digest:
        raise DeltaError(
            f"the delta leads to bucket {header.target.hex()[:8]}, the manifest wants {target_digest.hex()[:8]}"
        )
    num_words, rest = divmod(nbytes, header.word_bytes)
    # Bounds what decompression may allocate, before it does.
    if header.num_values > num_words or header.num_codes > header.num_values + num_words // SKIP:
        raise DeltaError(
            f"{header.num_codes} codes and {header.num_values} values for {num_words} words: the delta is malformed"
        )
    if (size := HEADER_BYTES + header.codes_nbytes + header.values_nbytes + rest) != len(payload):
        raise DeltaError(f"the delta has {len(payload)} bytes, its header says {size}: it is cut or padded")
    return header


def _changed_words(old: Buffer, new: Buffer, word_bytes: int, limit: int | None) -> np.ndarray | None:
    """Positions of the words that differ, ascending; None as soon as there are more than `limit`."""
    word, found, count = _WORDS[word_bytes], [np.empty(0, np.int64)], 0
    num_words = len(new) // word_bytes
    step = _PIECE_BYTES // word_bytes
    for start in range(0, num_words, step):
        size = min(step, num_words - start)
        at = start * word_bytes
        before, after = np.frombuffer(old, word, size, at), np.frombuffer(new, word, size, at)
        positions = _changed_in_piece(before, after)
        count += len(positions)
        # Stop within the first pieces where most words change, as in float32: declining must be cheap.
        if limit is not None and count > limit:
            return None
        found.append(positions + start)
    return np.concatenate(found)


def _changed_in_piece(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Compares eight bytes at a time, then word by word where they differ: few do."""
    per_block = 8 // before.itemsize
    whole = len(before) - len(before) % per_block
    ours, theirs = before[:whole].view(np.uint64), after[:whole].view(np.uint64)
    blocks = np.flatnonzero(ours != theirs)
    # Where a quarter of the blocks differ or more, gathering them saves nothing over one plain comparison.
    if len(blocks) * per_block * 4 > len(before):
        return np.flatnonzero(before != after)
    differs = ours[blocks].view(before.dtype) != theirs[blocks].view(before.dtype)
    inside = np.flatnonzero(differs)
    positions = blocks[inside // per_block] * per_block + inside % per_block
    rest = np.flatnonzero(before[whole:] != after[whole:]) + whole
    return np.concatenate((positions, rest)) if len(rest) else positions


def _codes(positions: np.ndarray) -> np.ndarray:
    """Distances as u16: as many SKIPs as a gap needs, then what is left of it."""
    # The first gap counts from the start of the bucket, as if a word before it had changed.
    gaps = np.diff(positions, prepend=-1) - 1
    skips, rest = np.divmod(gaps, SKIP)
    codes = np.full(len(gaps) + int(skips.sum()), SKIP, np.dtype("<u2"))
    codes[np.cumsum(skips + 1) - 1] = rest
    return codes


def _positions(codes: np.ndarray) -> np.ndarray:
    """The inverse of `_codes`."""
    has_value = codes != SKIP
    return np.cumsum(codes + has_value, dtype=np.int64)[has_value] - 1


def _pack(array: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(array.view(np.uint8))


def _unpack(data: memoryview, nbytes: int) -> bytes:
    """Decompress exactly `nbytes`; a frame that declares another size is refused unread."""
    try:
        # A frame may declare any size: refused before memory of that size is taken.
        if (declared := zstandard.frame_content_size(data)) != nbytes:
            raise DeltaError(f"a compressed part declares {declared} bytes, expected {nbytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a compressed part of the delta is damaged: {error}") from error
