from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.messages import Layout
from streamrl.weights.delta import HEADER_BYTES, SKIP, DeltaError, apply, encode, max_encoded, word_bytes_of
from streamrl.weights.manifest import bucket_digest, make_layout


def patched(payload: bytes, old: bytes, new: bytes) -> bytes:
    target = memoryview(bytearray(len(old)))
    apply(payload, old, target, base_digest=bucket_digest(old), target_digest=bucket_digest(new))
    return bytes(target)


def sparse(old: bytes, word_bytes: int, part: float, rng: np.random.Generator) -> bytes:
    words = np.frombuffer(old, f"<u{word_bytes}", len(old) // word_bytes).copy()
    chosen = rng.random(len(words)) < part
    words[chosen] = rng.integers(0, 1 << 8 * word_bytes, chosen.sum())
    return words.tobytes() + old[words.nbytes :]


@pytest.mark.parametrize("word_bytes", [2, 4])
@pytest.mark.parametrize("nbytes", [1, 3, 4, 8, 17, 1 << 20, (1 << 20) + 5])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_applying_gives_the_new_bytes_whatever_changed(word_bytes, nbytes, part):
    rng = np.random.default_rng(nbytes)
    old = rng.bytes(nbytes)
    new = bytearray(sparse(old, word_bytes, part, rng))
    new[-1] ^= 1  # the tail, where there is one

    payload = encode(old, bytes(new), word_bytes)

    assert payload is not None and len(payload) <= max_encoded(nbytes)
    assert patched(payload, old, bytes(new)) == new


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_two_buckets_of_one_size_are_a_delta_apart(data):
    nbytes = data.draw(st.integers(1, 200))
    old = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    new = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    word_bytes = data.draw(st.sampled_from([2, 4]))

    assert patched(encode(old, new, word_bytes), old, new) == new


@pytest.mark.parametrize("gap", [SKIP - 1, SKIP, SKIP + 1, 2 * SKIP - 1, 2 * SKIP, 3 * SKIP + 7])
def test_gaps_up_to_and_beyond_what_a_code_can_say(gap):
    old = bytes(2 * (gap + 2))
    new = bytearray(old)
    new[2 * gap] = new[-1] = 7  # first word after the gap, and the one after that

    assert patched(encode(old, bytes(new), 2), old, bytes(new)) == new


def test_a_thousand_versions_later_the_bytes_are_the_same():
    rng, steps = np.random.default_rng(5), random.Random(5)
    held = master = rng.bytes(300_001)
    for _ in range(1000):
        new = sparse(master, 2, steps.choice([0.0, 1e-5, 0.001, 0.01, 0.2]), rng)
        held = patched(encode(master, new, 2), held, new)
        master = new

    assert held == master


def test_applying_twice_changes_nothing_more():
    old, new = bytes(1000), bytes(500) + b"x" * 500
    payload = encode(old, new, 2)
    target = memoryview(bytearray(old))

    for _ in range(2):
        apply(payload, old, target, base_digest=bucket_digest(old), target_digest=bucket_digest(new))

    assert target == new


def test_one_percent_of_bfloat16_costs_less_than_two_and_a_half_percent_of_the_bytes():
    rng = np.random.default_rng(0)
    old = rng.bytes(1 << 21)

    payload = encode(old, sparse(old, 2, 0.01, rng), 2)

    assert payload is not None and len(payload) / len(old) <= 0.022


@pytest.mark.parametrize("part", [0.3, 1.0])
def test_what_would_be_too_large_is_given_up(part):
    rng = np.random.default_rng(0)
    old = rng.bytes(1 << 20)
    new = sparse(old, 2, part, rng)

    assert encode(old, new, 2, max_nbytes=len(old) // 4) is None
    assert encode(old, new, 2) is not None


def test_a_wrong_base_is_refused_before_anything_is_written():
    old, new, other = bytes(1000), b"x" * 1000, b"y" * 1000
    target = memoryview(bytearray(1000))

    with pytest.raises(DeltaError, match="wrong base.*take the full version"):
        apply(encode(old, new, 2), other, target, base_digest=bucket_digest(other), target_digest=bucket_digest(new))

    assert target == bytes(1000)


def test_a_delta_to_another_target_is_refused():
    old, new = bytes(1000), b"x" * 1000

    with pytest.raises(DeltaError, match="the manifest wants"):
        apply(
            encode(old, new, 2), old, memoryview(bytearray(1000)), base_digest=bucket_digest(old),
            target_digest=bytes(16),
        )


def test_no_flipped_bit_and_no_cut_passes():
    rng = np.random.default_rng(1)
    old = rng.bytes(4001)
    new = sparse(old, 2, 0.02, rng)
    payload = encode(old, new, 2)
    assert payload is not None
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert patched(bytes(damaged), old, new) == new  # padding of the header, or of a frame
        except DeltaError:
            continue
    for length in range(len(payload)):
        with pytest.raises(DeltaError):
            patched(payload[:length], old, new)


def forged(num_codes: int, num_values: int, codes: bytes, values: bytes, nbytes: int = 1000) -> bytes:
    old, new = bytes(nbytes), b"x" * nbytes
    packed = [zstandard.ZstdCompressor().compress(part) for part in (codes, values)]
    header = struct.pack(
        "<4sB3xQIIII16s16s", b"SRD1", 2, nbytes, num_codes, num_values, *map(len, packed), bucket_digest(old),
        bucket_digest(new),
    )
    return header + packed[0] + packed[1]


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (forged(1, 501, bytes(2), bytes(1002)), "malformed"),
        (forged(502, 1, bytes(1004), bytes(2)), "malformed"),
        (forged(1, 1, bytes(2), bytes(1 << 24)), "declares 16777216 bytes, expected 2"),
        (forged(1, 1, bytes(1 << 24), bytes(2)), "declares 16777216 bytes, expected 2"),
        (forged(1, 1, struct.pack("<H", 500), bytes(2)), "the last at 500 of 500"),
        (forged(2, 1, bytes(4), bytes(2)), "malformed"),
        (forged(1, 1, struct.pack("<H", SKIP), bytes(2)), "malformed"),
        (forged(1, 1, bytes(2), b"xx"), "leads to another bucket"),
    ],
)  # fmt: skip
def test_a_forged_delta_is_refused_before_it_takes_memory_or_writes_outside(payload, match):
    with pytest.raises(DeltaError, match=match):
        patched(payload, bytes(1000), b"x" * 1000)


def test_a_part_that_is_no_compressed_frame_is_refused():
    old, new = bytes(1000), b"x" * 1000
    payload = bytearray(encode(old, new, 2))
    payload[HEADER_BYTES : HEADER_BYTES + 4] = b"none"

    with pytest.raises(DeltaError, match="damaged|declares"):
        patched(bytes(payload), old, new)


def test_unequal_sizes_and_odd_words_are_refused():
    with pytest.raises(DeltaError, match="equally long"):
        encode(bytes(4), bytes(6), 2)
    with pytest.raises(DeltaError, match="words of 3"):
        encode(bytes(4), bytes(4), 3)


@pytest.mark.parametrize(
    ("dtypes", "word_bytes"), [(["bfloat16"], 2), (["float32"], 4), (["bfloat16", "float32"], 4), (["float16"], 2),
     (["bfloat16"] * 4 + ["float32"], 2)]
)
def test_words_are_as_wide_as_the_elements(dtypes, word_bytes):
    layout: Layout = make_layout(((str(place), dtype, (3,)) for place, dtype in enumerate(dtypes)), 100)

    assert word_bytes_of(layout) == word_bytes
