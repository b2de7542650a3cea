from __future__ import annotations

from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, TensorSpec, VersionRef
from streamrl.weights.manifest import (
    DTYPE_BYTES,
    bucket_digest,
    bucket_ranges,
    check_layout,
    check_manifest,
    document_nbytes,
    layout_digest,
    make_layout,
    make_manifest,
    root_of,
    same_weights,
    tensor_offsets,
)

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), min_size=1, max_size=12).map(
    lambda rows: [("first", "float32", (3,))] + [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)]
)


def manifest_of(layout: Layout, ref: VersionRef = VersionRef(2, 7)) -> Manifest:  # noqa: B008 (frozen)
    digests = [bucket_digest(bytes([index % 251]) * 9) for index in range(len(layout.bucket_bytes))]
    return make_manifest(layout, ref, None, digests)


@given(SPECS, st.integers(1, 500))
def test_tensors_are_consecutive_and_buckets_cover_them_exactly(specs, bucket_bytes):
    layout = make_layout(specs, bucket_bytes)

    end = 0
    for (spec, offset), (name, dtype, shape) in zip(tensor_offsets(layout), specs, strict=True):
        assert (spec.name, spec.dtype, spec.shape, offset) == (name, dtype, shape, end)
        end += prod(shape) * DTYPE_BYTES[dtype]
    assert document_nbytes(layout) == end
    starts, ends = zip(*bucket_ranges(layout), strict=True)
    assert starts == (0, *ends[:-1]) and ends[-1] == end
    assert all(size == bucket_bytes for size in layout.bucket_bytes[:-1])
    assert 0 < layout.bucket_bytes[-1] <= bucket_bytes


@given(SPECS, st.integers(1, 500))
def test_layout_and_manifest_survive_the_wire_with_the_same_identity(specs, bucket_bytes):
    layout = make_layout(specs, bucket_bytes)
    manifest = manifest_of(layout)

    layout_again = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    manifest_again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)

    assert layout_digest(layout_again) == layout_digest(layout)
    check_manifest(manifest_again, layout_again)


@pytest.mark.parametrize(
    "change",
    [
        {"ref": VersionRef(2, 8)},
        {"ref": VersionRef(3, 7)},
        {"layout_digest": bytes(16)},
        {"digest_kind": 1},
        {"root": bytes(16)},
        {"digests": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_manifest_with_one_field_changed_is_refused(change, layout):
    manifest = manifest_of(layout)

    with pytest.raises(WeightsError):
        check_manifest(msgspec.structs.replace(manifest, **change), layout)


@given(st.data())
def test_swapped_or_altered_bucket_digests_break_the_root(data):
    layout = make_layout([("w", "uint8", (64,))], 8)
    manifest = manifest_of(layout)
    digests = list(manifest.digests)
    one, two = data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True))
    digests[one], digests[two] = digests[two], digests[one]

    with pytest.raises(WeightsError, match="damaged or forged"):
        check_manifest(msgspec.structs.replace(manifest, digests=tuple(digests)), layout)


def test_the_canonical_encoding_never_changes():
    layout = make_layout([("a", "float32", (2, 3)), ("b", "bfloat16", (5,))], 16)
    manifest = make_manifest(layout, VersionRef(1, 2), None, [bytes(16), b"\xff" * 16, b"\x01" * 16])

    assert layout_digest(layout).hex() == "b040679faa6593922719cbee82e2b332"
    assert manifest.root.hex() == "e04a61c5923483e5eb32b11a46fb2d48"


def test_the_root_does_not_cover_the_parent_so_a_republished_version_keeps_its_identity(layout):
    manifest = manifest_of(layout)
    adopted = make_manifest(layout, manifest.ref, VersionRef(1, 3), manifest.digests)

    assert adopted.root == manifest.root == root_of(layout_digest(layout), manifest.ref, 0, manifest.digests)


def test_the_same_bytes_under_a_new_epoch_are_the_same_weights_with_another_root(layout):
    one = manifest_of(layout, VersionRef(1, 7))
    two = manifest_of(layout, VersionRef(2, 7))

    assert same_weights(one, two) and one.root != two.root


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "holds no bytes"),
        ([("a", "float32", (0, 4))], "holds no bytes"),
        ([("a", "float32", (2,)), ("a", "float32", (3,))], "twice"),
        ([("a", "complex64", (2,))], "complex64"),
    ],
)
def test_impossible_layouts_are_refused_by_name(specs, words):
    with pytest.raises(WeightsError, match=words):
        make_layout(specs, 16)


def test_a_peers_layout_whose_buckets_and_tensors_disagree_is_refused():
    tensors = (TensorSpec("a", "float32", (4,)),)

    for bucket_bytes in ((8,), (16, 16), (16, 0), ()):
        with pytest.raises(WeightsError, match="same bytes"):
            check_layout(Layout(tensors, bucket_bytes))
    check_layout(Layout(tensors, (7, 9)))


def test_a_manifest_for_another_wire_dtype_says_which_side_has_which_layout():
    ours = make_layout([("w", "float32", (8,))], 16)
    theirs = make_layout([("w", "bfloat16", (16,))], 16)

    with pytest.raises(WeightsError, match=f"{layout_digest(theirs).hex()[:8]}.*{layout_digest(ours).hex()[:8]}"):
        check_manifest(manifest_of(theirs), ours)
