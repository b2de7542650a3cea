"""Lossless encoding of the difference between two versions of a bucket, as new values over old ones. Pure.

A bucket is a sequence of little-endian words of 2 or 4 bytes. The encoded form holds the distances between changed
words and their new values, never a difference or an XOR, so that applying a repeated delivery is harmless.

    header   64 bytes: magic, word size, bucket size, counts, sizes, digest of the base, digest of the target
    codes    u16, zstd: g < 65535 "pass over g words, then comes a value"; 65535 "pass over 65,535 words, no value"
    values   u16 or u32, zstd: the new words, in order
    tail     the bucket's last bytes that do not fill a word, as they are

A delta is untrusted: sizes are bounded by the bucket before memory is taken, the base must be the one that was encoded
against, and the result must have the target's digest.

The hub encodes the newest version against its parent when the first receiver asks (`DeltaStore`):

    offered     both documents are mapped here; nothing is encoded yet
    encoding    a receiver asked; one bucket per step, between two answers of the socket's thread
    ready       index and payloads can be pulled, until the version retires
    declined    the encoded form would be more than `max_ratio` of the full one: receivers take the full version

After the first request later versions are encoded as they are published.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from streamrl.errors import ContentError, WeightsError
from streamrl.messages import DeltaIndex, Layout, Manifest, Pull, VersionRef
from streamrl.weights.document import Document, NotAvailable
from streamrl.weights.manifest import DTYPE_BYTES, bucket_digest, bucket_ranges, document_nbytes, tensor_nbytes

log = logging.getLogger(__name__)

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


# --- the serving side ----------------------------------------------------------------------------------------------

INDEX_BUCKET = 0xFFFFFFFF
"""The bucket number under which a delta's `DeltaIndex` is pulled."""
BUSY_RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Served:
    """One document that can be pulled."""

    manifest: Manifest
    buckets: Sequence[memoryview]


class Encoding:
    """One delta while it is encoded; used by one thread."""

    def __init__(self, new: Served, old: Served, word_bytes: int, max_ratio: float) -> None:
        self.new, self._old, self._word_bytes = new, old, word_bytes
        # A budget for the whole delta: buckets that barely changed pay for those that changed a lot.
        self._room = int(max_ratio * sum(map(len, new.buckets)))
        self._payloads: list[bytes] = []
        self.parent = old.manifest.ref
        self.declined = False
        self.index: bytes | None = None

    @property
    def finished(self) -> bool:
        return self.declined or self.index is not None

    def step(self) -> None:
        """Encode one more bucket; the last one makes the index."""
        at = len(self._payloads)
        payload = encode(
            self._old.buckets[at], self.new.buckets[at], self._word_bytes, max_nbytes=self._room,
            base_digest=self._old.manifest.digests[at], target_digest=self.new.manifest.digests[at],
        )
        # Over the budget: the payloads so far are of no use, so their memory is freed at once.
        if payload is None:
            self.declined, self._payloads = True, []
            return
        self._room -= len(payload)
        self._payloads.append(payload)
        if len(self._payloads) == len(self.new.buckets):
            sizes, digests = tuple(map(len, self._payloads)), tuple(map(bucket_digest, self._payloads))
            parent = self._old.manifest
            self.index = msgspec.msgpack.encode(DeltaIndex(parent.ref, parent.root, sizes, digests))
            self._old = self.new  # releases the parent's memory

    def source(self, bucket: int) -> memoryview:
        """The bytes behind a bucket number, `INDEX_BUCKET` included, once the index exists."""
        assert self.index is not None
        if bucket == INDEX_BUCKET:
            return memoryview(self.index)
        if bucket >= len(self._payloads):
            raise ContentError("pull_range", f"PULL of delta bucket {bucket}, there are {len(self._payloads)}")
        return memoryview(self._payloads[bucket])


class DeltaStore:
    """The deltas of one server; one over `max_ratio` of the full bytes is declined, and 0 encodes none."""

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._encodings: OrderedDict[VersionRef, Encoding] = OrderedDict()
        self._wanted = False

    def add(self, new: Served, old: Served | None, word_bytes: int) -> None:
        """Offer the delta of a new version from its parent `old`, if that is held; drop unfinished older ones."""
        # Receivers want the newest version by now; finishing an older delta would only delay its encoding.
        for ref in [ref for ref, encoding in self._encodings.items() if encoding.index is None]:
            del self._encodings[ref]
        if old is not None and self._max_ratio > 0:
            self._encodings[new.manifest.ref] = Encoding(new, old, word_bytes, self._max_ratio)

    def retire(self, ref: VersionRef) -> None:
        self._encodings.pop(ref, None)

    def parent_of(self, ref: VersionRef) -> VersionRef | None:
        """The base of this version's delta; None if there is none."""
        # One that is not finished counts: a receiver that asks for it gets BUSY until it is.
        encoding = self._encodings.get(ref)
        return None if encoding is None or encoding.declined else encoding.parent

    def next_job(self) -> Encoding | None:
        """The delta that needs a `step()` now."""
        # Without a receiver that asks, as when all actors map shared memory, no time goes into encoding.
        if not self._wanted:
            return None
        return next((encoding for encoding in self._encodings.values() if not encoding.finished), None)

    def find(self, pull: Pull) -> Encoding | None:
        """The delta that a PULL asks for, ready or not; later ones are encoded without a request."""
        self._wanted = True
        encoding = self._encodings.get(pull.target)
        return None if encoding is None or encoding.declined else encoding


# --- the receiving side --------------------------------------------------------------------------------------------


class DeltaUnavailable(NotAvailable):
    """The hub serves no delta of this version: it would be too large, or its parent has retired. Not a fault."""


class DeltaBase:
    """The last verified document of this process, from which deltas start.

    After `MAX_FAILURES` wrong deltas in a row only full versions are pulled, until the process starts again.
    """

    MAX_FAILURES = 2

    def __init__(self) -> None:
        self._document: Document | None = None
        self._num_failures = 0

    @property
    def trusted(self) -> bool:
        return self._num_failures < self.MAX_FAILURES

    def keep(self, document: Document) -> None:
        """Make a verified document the base, unless a newer one is held."""
        # A fetch that ends late must not replace a newer base: the next delta starts from the newest.
        if self._document is None or self._document.manifest.ref <= document.manifest.ref:
            self._document = document

    def base_of(self, manifest: Manifest, parent: VersionRef | None) -> Document | None:
        """The held document, if the delta on offer starts from it."""
        base = self._document
        if base is None or parent is None or not self.trusted or parent != manifest.parent:
            return None
        same_layout = base.manifest.layout_digest == manifest.layout_digest
        return base if base.manifest.ref == parent and same_layout else None

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, error: WeightsError) -> None:
        self._num_failures += 1
        then = "the full version is pulled" if self.trusted else "only full versions are pulled until a restart"
        log.warning("a delta failed, %s: %s", then, error)


def apply_delta(
    base: Document, manifest: Manifest, layout: Layout, payloads: list[memoryview], memory: memoryview
) -> Document:
    """The verified new document, in `memory`. Raises DeltaError; `memory` is undefined then."""
    assert len(memory) == document_nbytes(layout), (len(memory), document_nbytes(layout))
    started = time.perf_counter()
    for at, (start, end) in enumerate(bucket_ranges(layout)):
        apply(
            payloads[at], base.view(start, end), memory[start:end],
            base_digest=base.manifest.digests[at], target_digest=manifest.digests[at],
        )
    return Document(memory, manifest, layout, verified=True, verify_s=time.perf_counter() - started)
