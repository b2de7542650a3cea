"""Documents by several threads: the bytes and digests of one, and a failure in one of them ends the publication."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import learner.publish.buckets as buckets
from learner.publish.buckets import BucketWriter, num_threads
from learner.publish.publisher import Publisher
from streamrl.errors import WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from streamrl.weights.manifest import bucket_digest, bucket_ranges, make_layout
from tests.kit.each import each

CPU, KINDS = torch.device("cpu"), (torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.uint8)


def document(seed: int):
    """Tensors of random sizes, wide elements first, and their types in the document: some are cast."""
    chosen = random.Random(seed)
    kinds = sorted((chosen.choice(KINDS) for _ in range(chosen.randrange(1, 9))), key=lambda kind: -kind.itemsize)
    sizes = [chosen.choice([0, 1, 7, 100, 70_000, 140_001]) for _ in kinds[1:]] + [9]
    tensors = [torch.randint(0, 200, (size,)).to(kind) for size, kind in zip(sizes, kinds, strict=True)]
    given = [one.float() if one.dtype == torch.bfloat16 and chosen.random() < 0.7 else one for one in tensors]
    layout = make_layout(
        ((f"t{i}", str(one.dtype).removeprefix("torch."), one.shape) for i, one in enumerate(tensors)),
        chosen.choice([8, 1000, 4096, 1 << 20]) if sum(one.nbytes for one in tensors) < 5000 else 1 << 18,
    )
    return layout, kinds, given, b"".join(one.view(torch.uint8).numpy().tobytes() for one in tensors)


@each("seed", range(60))
def test_threads_write_the_bytes_and_digests_of_one(seed):
    layout, kinds, given, expected = document(seed)
    for threads in (1, 3):
        writer, body = BucketWriter(layout, kinds, CPU, threads=threads), bytearray(len(expected))
        assert writer.takes(given)
        for _ in range(2):  # a writer is used for every version
            digests = writer.write(given, memoryview(body))
            assert body == expected
            assert digests == [bucket_digest(expected[start:end]) for start, end in bucket_ranges(layout)]


def test_tensors_that_cannot_be_cut_are_left_to_the_gathering_way():
    whole = torch.arange(6.0).view(2, 3)
    layout = make_layout([("w", "float32", (2, 3))], 8)
    assert BucketWriter(layout, [torch.float32], CPU).takes([whole])
    assert not BucketWriter(layout, [torch.float32], CPU).takes([whole.t()])
    assert not BucketWriter(make_layout([("w", "float32", (2, 3))], 10), [torch.float32], CPU).takes([whole])


def test_the_number_of_threads_follows_cores_and_size():
    assert [num_threads(1 << 30, cores) for cores in (1, 2, 3, 64)] == [1, 2, 3, 4]
    assert [num_threads(nbytes, 64) for nbytes in (0, 60 << 20, 64 << 20, 100 << 20)] == [1, 1, 2, 3]


def test_a_failing_thread_ends_the_publication_with_its_cause_and_the_next_one_comes(shm, monkeypatch):
    monkeypatch.setattr(buckets, "num_threads", lambda nbytes: 3)
    weight = torch.randn(1 << 16)
    publisher = Publisher([("w", weight)], wire_dtype=torch.float32, bucket_bytes=4096, shm=shm)
    filled, begun = buckets.filled, []

    def broken(target, *given):
        begun.append(target)
        if len(begun) == 5:
            raise OSError("the disk is gone")
        return filled(target, *given)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "filled", broken)
        with pytest.raises(WeightsError, match="version 1:0 was not published.*the disk is gone") as caught:
            publisher.publish(VersionRef(1, 0))
    assert isinstance(caught.value.__cause__, OSError) and len(begun) >= 5
    assert [path.name for path in shm.directory.iterdir()] == ["owner.lock"]
    assert not [one for one in threading.enumerate() if one.name.startswith("document")]

    published = publisher.publish(VersionRef(1, 1))
    assert published is not None and published.manifest.parent is None
    found = Document.map_file(published.path, published.manifest, publisher.layout).verify().tensors()["w"]
    assert torch.equal(found, weight)
