"""The digest of buckets on a device: the same number from every implementation, another one for every damage."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights.gpu.device_document import _ROW_WORDS, DocumentFold, fold128, fold_sums, pack
from streamrl.weights.manifest import make_layout
from tests.unit.weights.fold_reference import fold128_numpy

MOD = 1 << 64


def by_definition(data: bytes) -> bytes:
    padded = data + bytes(-len(data) % 4)
    words = [word for (word,) in struct.iter_unpack("<I", padded)]
    return struct.pack("<QQ", sum(words) % MOD, sum(i * w for i, w in enumerate(words, 1)) % MOD)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@given(st.binary(max_size=300))
def test_numpy_torch_and_the_definition_agree_on_any_bytes(data):
    assert fold128_numpy(data) == by_definition(data) == fold128(tensor_of(data))


@pytest.mark.parametrize("num_words", [_ROW_WORDS - 1, _ROW_WORDS, 3 * _ROW_WORDS + 5])
@pytest.mark.parametrize("word", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_they_agree_on_extreme_words_over_several_rows(num_words, word):
    data = struct.pack("<I", word) * num_words + b"\xff\xff"

    assert fold128(tensor_of(data)) == fold128_numpy(data) == by_definition(data)


def test_the_sums_wrap_at_two_to_the_64(monkeypatch):
    monkeypatch.setattr("streamrl.weights.gpu.device_document._BLOCK_WORDS", 2 * _ROW_WORDS)
    data = np.full(1 << 18, 0xFFFFFFFF, dtype="<u4").tobytes()

    # 2^18 words of almost 2^32: the second sum passes 2^64 several times over.
    assert sum(range(1, (1 << 18) + 1)) * 0xFFFFFFFF > 1 << 66
    assert fold128(tensor_of(data)) == fold128_numpy(data) == by_definition(data)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_pieces_cut_anywhere_add_up_to_the_whole(data, draw):
    cut = draw.draw(st.integers(0, len(data)))
    one, other = tensor_of(data)[:cut], tensor_of(data)[cut:]

    assert pack(*(fold_sums(one, 0) + fold_sums(other, cut)).tolist()) == by_definition(data)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 50), st.integers(0, 99))
def test_a_document_folded_tensor_by_tensor_has_the_digests_of_its_buckets(sizes, bucket_bytes, seed):
    if not sum(sizes):
        sizes = [1]
    layout = make_layout(((f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)), bucket_bytes)
    body = random.Random(seed).randbytes(sum(sizes))
    fold, start = DocumentFold(layout, "cpu"), 0
    for size in sizes:
        fold.append(tensor_of(body[start : start + size]))
        start += size

    expected, start = [], 0
    for size in layout.bucket_bytes:
        expected.append(by_definition(body[start : start + size]))
        start += size
    assert fold.digests() == expected


def test_a_document_that_is_short_or_long_is_refused():
    layout = make_layout([("a", "uint8", (10,))], bucket_bytes=4)
    fold = DocumentFold(layout, "cpu")
    fold.append(tensor_of(b"12345"))

    with pytest.raises(WeightsError, match="only 1 of 3"):
        fold.digests()
    with pytest.raises(WeightsError, match="more bytes"):
        fold.append(tensor_of(bytes(6)))


DATA = random.Random(5).randbytes(40_000)
DAMAGE = {
    "missing": DATA[:-4],
    "missing_is_zero": DATA[:20_000] + bytes(20_000),
    "torn": random.Random(6).randbytes(16_384) + DATA[16_384:],
    "shifted_by_a_word": DATA[4:] + DATA[:4],
    "shifted_by_a_byte": DATA[1:] + DATA[:1],
    "swapped_blocks": DATA[20_000:] + DATA[:20_000],
    "swapped_words": DATA[4:8] + DATA[:4] + DATA[8:],
    "one_bit": bytes([DATA[0] ^ 1]) + DATA[1:],
    "highest_bit": DATA[:39_999] + bytes([DATA[-1] ^ 0x80]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_changes_the_digest(damage):
    assert fold128(tensor_of(DAMAGE[damage])) != fold128(tensor_of(DATA))
    assert fold128(tensor_of(DAMAGE[damage])) == fold128_numpy(DAMAGE[damage])


def test_the_layout_of_a_digest_is_two_little_endian_sums():
    assert fold128(tensor_of(struct.pack("<III", 5, 0, 7))) == struct.pack("<QQ", 12, 5 + 3 * 7)
