"""Identity of a version: the layout of its document, a digest per bucket, and a root over all of them. Pure.

A document is the model's tensors as consecutive bytes in layout order, without padding. Buckets are consecutive byte
ranges of the document, every one `bucket_bytes` long except the last; a tensor may span buckets. Transports move
buckets, engines read tensors.

    tensors   |--- embed ---|-- q --|- k -|- v -|--- o ---| ...
    buckets   |------ 0 ------|------ 1 ------|------ 2 ------| ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod

import msgspec
import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, TensorSpec, VersionRef

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}
"""Bytes an element, for every dtype that may travel."""

DIGEST_XXH3 = 0
"""digest_kind of documents on the host: xxh3-128 of the bucket's bytes."""
DIGEST_FOLD128 = 1
"""digest_kind of buckets in the memory of a GPU: `streamrl.weights.gpu.device_document`."""


def make_layout(specs: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Layout:
    """The layout of a model's document.

    Args:
        specs: (checkpoint name, dtype, shape), in document order, tied copies left out.
        bucket_bytes: of every bucket but the last.
    Raises:
        WeightsError: no tensors, a name twice, or a dtype that cannot travel.
    """
    if bucket_bytes < 1:
        raise WeightsError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
    tensors = tuple(TensorSpec(name, dtype, tuple(int(size) for size in shape)) for name, dtype, shape in specs)
    nbytes = sum(map(tensor_nbytes, tensors))
    full, rest = divmod(nbytes, bucket_bytes)
    layout = Layout(tensors, (bucket_bytes,) * full + ((rest,) if rest else ()))
    check_layout(layout)
    return layout


def check_layout(layout: Layout) -> None:
    """Raise WeightsError for a layout, perhaps a peer's, whose tensors and buckets do not describe the same bytes."""
    names = [spec.name for spec in layout.tensors]
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise WeightsError(f"tensor {twice!r} is twice in the layout: leave tied copies out")
    nbytes = sum(map(tensor_nbytes, layout.tensors))
    if nbytes == 0:
        raise WeightsError("the layout holds no bytes: a model without parameters cannot be published")
    if sum(layout.bucket_bytes) != nbytes or 0 in layout.bucket_bytes:
        raise WeightsError(
            f"the layout's {len(layout.bucket_bytes)} buckets hold {sum(layout.bucket_bytes)} bytes, "
            f"its {len(names)} tensors {nbytes}: they must be the same bytes, and no bucket empty"
        )


def tensor_nbytes(spec: TensorSpec) -> int:
    """Bytes of one tensor in the document."""
    if spec.dtype not in DTYPE_BYTES:
        raise WeightsError(f"tensor {spec.name!r} has dtype {spec.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def tensor_offsets(layout: Layout) -> list[tuple[TensorSpec, int]]:
    """Every tensor with its first byte in the document."""
    return list(zip(layout.tensors, accumulate(map(tensor_nbytes, layout.tensors), initial=0), strict=False))


def bucket_ranges(layout: Layout) -> list[tuple[int, int]]:
    """Half-open byte range of every bucket in the document."""
    return list(pairwise(accumulate(layout.bucket_bytes, initial=0)))


def document_nbytes(layout: Layout) -> int:
    """Bytes of the whole document."""
    return sum(layout.bucket_bytes)


def layout_digest(layout: Layout) -> bytes:
    """xxh3-128 of the layout's MessagePack form; changes only with the model, the wire dtype or the bucket size."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(layout))


def bucket_digest(view: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of one bucket's bytes (digest_kind 0)."""
    return xxhash.xxh3_128_digest(view)


def root_of(layout_id: bytes, ref: VersionRef, digest_kind: int, digests: Sequence[bytes]) -> bytes:
    """xxh3-128 over (layout digest, learner epoch, version, digest kind, all bucket digests), as MessagePack."""
    # Without the parent: it says only what a delta starts from, the weights are the same without it.
    identity = (layout_id, ref.learner_epoch, ref.version, digest_kind, tuple(digests))
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(identity))


def make_manifest(
    layout: Layout, ref: VersionRef, parent: VersionRef | None, digests: Sequence[bytes], kind: int = DIGEST_XXH3
) -> Manifest:
    """The manifest of a document whose buckets have these digests."""
    layout_id = layout_digest(layout)
    root = root_of(layout_id, ref, kind, digests)
    manifest = Manifest(ref, parent, layout_id, kind, tuple(digests), root)
    check_manifest(manifest, layout, kind)
    return manifest


def check_manifest(manifest: Manifest, layout: Layout, kind: int = DIGEST_XXH3) -> None:
    """Raise WeightsError for a manifest of another layout, number of buckets or digest kind, or with a wrong root."""
    check_layout(layout)
    ours = layout_digest(layout)
    if manifest.layout_digest != ours:
        raise WeightsError(
            f"version {manifest.ref} has layout {manifest.layout_digest.hex()[:8]}, this side has {ours.hex()[:8]}: "
            "learner and actor must load the same model with the same wire dtype"
        )
    if manifest.digest_kind != kind:
        where = "a document on a host" if kind == DIGEST_XXH3 else "buckets on a GPU"
        raise WeightsError(f"version {manifest.ref} has digest kind {manifest.digest_kind}, {where} need kind {kind}")
    if len(manifest.digests) != len(layout.bucket_bytes):
        raise WeightsError(
            f"version {manifest.ref} has {len(manifest.digests)} digests for {len(layout.bucket_bytes)} buckets"
        )
    root = root_of(manifest.layout_digest, manifest.ref, manifest.digest_kind, manifest.digests)
    if root != manifest.root:
        raise WeightsError(
            f"version {manifest.ref} names root {manifest.root.hex()[:8]}, its digests give {root.hex()[:8]}: "
            "the manifest was damaged or forged"
        )


def same_weights(one: Manifest, other: Manifest) -> bool:
    """The same bytes under two version numbers (the root differs, because it covers the version)."""
    return (one.layout_digest, one.digest_kind, one.digests) == (other.layout_digest, other.digest_kind, other.digests)
