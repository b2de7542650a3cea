"""The weights of an examination: versions that differ in every bucket, and pulls that are damaged now and then."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from streamrl.messages import Chunk, ChunkStatus, Layout, Manifest, Publish, Pull, PullMode, VersionRef
from streamrl.weights.assets import pack_assets
from streamrl.weights.document import pack_header
from streamrl.weights.manifest import bucket_digest, bucket_ranges, make_layout, make_manifest

NUM_BUCKETS = 3
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Model:
    """A model as bytes: its tensors, the first version of its weights, its asset files."""

    tensors: list[tuple[str, str, tuple[int, ...]]]
    body: bytes
    assets: bytes

    @classmethod
    def read(cls, directory: Path) -> Model:
        """A checkpoint in one safetensors file, in the order of that file."""
        raw = (directory / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header: dict[str, Any] = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        tensors = [(name, _DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in ordered]
        return cls(tensors, raw[8 + size :], pack_assets(directory))

    def layout(self) -> Layout:
        return make_layout(self.tensors, -(-len(self.body) // NUM_BUCKETS))

    def version(self, number: int) -> bytes:
        """Weights that differ from all others in every bucket, by less than rounding: the lowest bits of one byte each.

        A little-endian float's first byte is the low end of its fraction.
        """
        changed = bytearray(self.body)
        for start, _ in bucket_ranges(self.layout()):
            at = start + -start % 4
            changed[at] = (changed[at] + number) % 256
        return bytes(changed)

    def publication(self, directory: Path, ref: VersionRef, *, first: bool) -> Publish:
        """The version's document in a file of `directory`, as a learner would publish it to its hub."""
        layout, body = self.layout(), self.version(ref.version)
        manifest = make_manifest(layout, ref, None, [bucket_digest(body[a:b]) for a, b in bucket_ranges(layout)])
        path = directory / f"weights-{ref.learner_epoch}.{ref.version}"
        path.write_bytes(pack_header(os.urandom(16), ref, len(body)) + body)
        assets = directory / "assets.msgpack"
        assets.write_bytes(self.assets)
        return Publish(manifest, str(path), len(body), layout if first else None, str(assets) if first else "")


@dataclass
class Pulls:
    """What an actor fetched, byte range by byte range, and which answers are damaged.

    The first answer of bucket 0 has a wrong payload under the digest of the right one; the first of bucket 1 has a
    digest that fits its wrong payload, so that only the bucket's own digest shows the damage.
    """

    good: dict[bytes, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    """Digest of a bucket -> ranges of it that were served undamaged."""
    num_damaged: int = 0
    damaged: set[int] = field(default_factory=set)
    digest_of: dict[tuple[VersionRef, int], bytes] = field(default_factory=dict)

    def know(self, manifest: Manifest) -> None:
        for bucket, digest in enumerate(manifest.digests):
            self.digest_of[manifest.ref, bucket] = digest

    def served(self, pull: Pull, chunk: Chunk, payload: memoryview) -> tuple[Chunk, memoryview]:
        """The answer as it leaves."""
        if chunk.status != ChunkStatus.OK or pull.mode != PullMode.FULL:
            return chunk, payload
        if pull.bucket in (0, 1) and pull.bucket not in self.damaged:
            self.damaged.add(pull.bucket)
            wrong = memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
            digest = chunk.digest if pull.bucket == 0 else xxhash.xxh3_64_intdigest(wrong)
            return msgspec.structs.replace(chunk, digest=digest), wrong
        self.good[self.digest_of[pull.target, pull.bucket]].add((pull.offset, pull.offset + len(payload)))
        return chunk, payload

    def missing(self, manifest: Manifest, layout: Layout) -> str:
        """Which part of a version was never served undamaged; "" if it was whole."""
        for bucket, (digest, size) in enumerate(zip(manifest.digests, layout.bucket_bytes, strict=True)):
            reached = 0
            for start, end in sorted(self.good[digest]):
                if start <= reached:
                    reached = max(reached, end)
            if reached < size:
                return f"bytes {reached} to {size} of bucket {bucket}"
        return ""


class WatchedSocket:
    """The weight socket's `ChunkSocket`, every answer of which goes through `pulls`."""

    def __init__(self, socket: Any, pulls: Pulls) -> None:
        self._socket, self._pulls = socket, pulls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def serve(self, chunks: Any) -> None:
        self._socket.serve(_WatchedChunks(chunks, self._pulls))


class _WatchedChunks:
    def __init__(self, chunks: Any, pulls: Pulls) -> None:
        self._chunks, self._pulls, self.deltas = chunks, pulls, chunks.deltas

    def answer(self, pull: Pull) -> tuple[Chunk, memoryview]:
        return self._pulls.served(pull, *self._chunks.answer(pull))
