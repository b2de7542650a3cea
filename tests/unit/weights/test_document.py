from __future__ import annotations

import gc
import os
import random
import subprocess
import sys

import pytest
import torch

from streamrl.errors import WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.document import HEADER_BYTES, Document
from streamrl.weights.manifest import bucket_digest, bucket_ranges, make_layout, make_manifest


def manifest_of(body, layout, ref=VersionRef(1, 0)):  # noqa: B008 (frozen)
    return make_manifest(layout, ref, None, [bucket_digest(body[start:end]) for start, end in bucket_ranges(layout)])


def test_a_flip_of_any_byte_is_refused_and_names_its_bucket(layout, publish):
    manifest, _, body = publish(layout, 1)
    ranges = bucket_ranges(layout)

    for position in range(len(body)):
        damaged = bytearray(body)
        damaged[position] ^= 1 << (position % 8)
        index = next(index for index, (start, end) in enumerate(ranges) if start <= position < end)
        with pytest.raises(WeightsError, match=f"bucket {index} of {len(ranges)} of version 1:1 has digest .* says"):
            Document(damaged, manifest, layout).verify()


def test_a_cut_at_any_byte_is_refused_and_names_its_bucket(layout, publish):
    manifest, _, body = publish(layout, 1)
    ranges = bucket_ranges(layout)

    for length in range(len(body)):
        index = next(index for index, (_, end) in enumerate(ranges) if length < end)
        with pytest.raises(WeightsError, match=f"bucket {index} of {len(ranges)} of version 1:1 is cut"):
            Document(body[:length], manifest, layout).verify()
    with pytest.raises(WeightsError, match="has 1889 bytes"):
        Document(body + b"x", manifest, layout).verify()


def test_a_file_cut_or_flipped_at_random_bytes_is_refused(layout, publish, tmp_path):
    manifest, path, _ = publish(layout, 1)
    whole = path.read_bytes()
    rng = random.Random(20)
    damaged = tmp_path / "damaged"
    Document.map_file(path, manifest, layout).verify()

    for _ in range(300):
        position = rng.randrange(16, len(whole))  # the probe before byte 16 is free, the receiver checks it
        if rng.random() < 0.5:
            damaged.write_bytes(whole[:position])
        elif 48 <= position < HEADER_BYTES or 28 <= position < 32:
            continue  # padding
        else:
            damaged.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(WeightsError):
            Document.map_file(damaged, manifest, layout).verify()


def test_an_unverified_document_gives_no_tensors(layout, publish):
    manifest, path, _ = publish(layout, 1)

    with pytest.raises(WeightsError, match="not verified"):
        Document.map_file(path, manifest, layout).tensors()


def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit():
    torch.manual_seed(0)
    tensors = {
        "odd": torch.randint(-9, 9, (3,), dtype=torch.int8),  # leaves everything after it unaligned
        "weight": torch.randn(5, 7),
        "half": torch.randn(2, 3).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    layout = make_layout(((name, str(t.dtype)[6:], t.shape) for name, t in tensors.items()), bucket_bytes=50)
    body = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())

    loaded = Document(body, manifest_of(body, layout), layout).verify().tensors()

    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_tensors_are_views_that_outlive_the_document_and_the_file(layout, publish):
    manifest, path, body = publish(layout, 1)
    document = Document.map_file(path, manifest, layout).verify()
    tensors = document.tensors()
    first = tensors["embed"]
    assert tensors["mlp.up"].data_ptr() - first.data_ptr() == 33 * 5 * 4 + 4

    path.unlink()
    del document, tensors
    gc.collect()

    assert first.numpy().tobytes() == body[: 33 * 5 * 4]


def test_a_stray_write_into_a_tensor_stays_out_of_the_file(layout, publish):
    manifest, path, _ = publish(layout, 1)
    before = path.read_bytes()

    Document.map_file(path, manifest, layout).verify().tensors()["embed"].zero_()

    assert path.read_bytes() == before


def test_a_file_of_another_version_is_refused_by_its_header(layout, publish):
    _, path, _ = publish(layout, 1)
    newer, _, _ = publish(layout, 2)

    with pytest.raises(WeightsError, match="holds version 1:1 .* wanted 1:2"):
        Document.map_file(path, newer, layout)


def test_renaming_needs_the_same_bytes_and_a_verified_document(layout, publish):
    manifest, path, _ = publish(layout, 1, seed=5)
    document = Document.map_file(path, manifest, layout)
    reborn, _, _ = publish(layout, 1, epoch=2, seed=5)
    other, _, _ = publish(layout, 2, epoch=2, seed=6)

    with pytest.raises(WeightsError):
        document.renamed(reborn)
    document.verify()
    with pytest.raises(WeightsError):
        document.renamed(other)

    assert document.renamed(reborn).manifest.ref == VersionRef(2, 1)
    assert torch.equal(document.renamed(reborn).tensors()["norm"], document.tensors()["norm"])


def test_the_hubs_half_of_the_weight_plane_imports_no_torch(python_env):
    program = (
        "import sys, streamrl.weights.pull.chunk_server, streamrl.weights.shm.directory;"
        "import streamrl.weights.shm.transport, streamrl.weights.assets;"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], env=python_env, timeout=60).returncode == 0


def test_files_are_readable_by_their_owner_alone(layout, publish):
    _, path, _ = publish(layout, 1)

    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path.parent).st_mode & 0o777 == 0o700
