"""The wire form: what is refused, by which error, and how many bytes a token costs."""

import json

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from streamrl import messages as wire
from streamrl.errors import BodyError, ContentError, DigestError, FrameError, KindError, ProtocolVersionError, WireError
from streamrl.messages import PROTOCOL, TO_ACTOR, TO_HUB, Bye, Group, Member, MemberStatus, Sampling, Span, Turn
from streamrl.messages.codec import (
    MAGIC,
    PREAMBLE,
    Decoder,
    encode,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from tests.unit.messages.examples import GOLDEN, WITHOUT_KIND, frame_of, messages, structs


def make_group(num_tokens: int) -> Group:
    rng = np.random.default_rng(0)
    member = Member(
        index=0, status=MemberStatus.FINISHED, prompt_ids=b"", token_ids=pack_ids(rng.integers(0, 50_000, num_tokens)),
        logprobs=pack_logprobs(-rng.random(num_tokens)), mask=((0, num_tokens),), versions=(Span(1, 7, 0, num_tokens),),
        turns=(Turn(0, num_tokens, 1.0),), reward=1.0, scores={"score": 1.0}, finish="stop",
    )
    return Group(1 << 50, 9, 12, 0, 0, 0, "", Sampling(), (member,), {"generate_s": 0.5})


def test_a_thousand_tokens_cost_at_most_8_3_bytes_each_with_header_and_spans():
    assert len(encode(make_group(1000))) / 1000 <= 8.3


def test_every_message_survives_the_round_trip():
    group = make_group(10)
    assert Decoder(TO_HUB).decode(encode(group)) == group
    assert Decoder(TO_HUB).decode(encode(Bye(2**64 - 1, "x"))) == Bye(2**64 - 1, "x")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda f: b"HTTP" + f[4:], FrameError),
        (lambda f: f[:4] + b"\x02\x00" + f[6:], ProtocolVersionError),
        (lambda f: f[:6] + b"\x63" + f[7:], KindError),
        (lambda f: f[:7] + b"\x01" + f[8:], FrameError),
        (lambda f: f[:-1] + bytes([f[-1] ^ 1]), DigestError),
        (lambda f: f[:10], FrameError),
    ],
    ids=["magic", "protocol", "kind", "flags", "flipped body", "short"],
)
def test_each_kind_of_damage_has_an_error_of_its_own(spoil, error):
    with pytest.raises(error):
        Decoder(TO_HUB).decode(spoil(bytes(encode(make_group(5)))))


def test_a_legal_message_in_the_wrong_direction_is_refused():
    with pytest.raises(KindError, match="kind 4 is not legal here"):
        Decoder(TO_ACTOR).decode(encode(make_group(5)))


def test_a_frame_over_the_size_limit_is_refused_before_it_is_read():
    with pytest.raises(FrameError, match="max_message_bytes"):
        Decoder(TO_HUB, max_bytes=100).decode(encode(make_group(1000)))


def frame_with_body(body: bytes, kind: int = 4) -> bytes:
    import xxhash

    return PREAMBLE.pack(b"SRLM", 1, kind, 0, xxhash.xxh3_64_intdigest(body)) + body


@pytest.mark.parametrize(
    "body",
    [
        b"\xc0",
        msgspec.msgpack.encode(["not", "a", "group"]),
        b"\x91" * 5000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode(make_group(3)) + b"\x00",
    ],
    ids=["nil", "wrong types", "deep nesting", "declared length lies", "trailing bytes"],
)
def test_a_well_signed_but_impossible_body_is_an_error_not_a_crash(body):
    with pytest.raises(BodyError):
        Decoder(TO_HUB).decode(frame_with_body(body))


@given(st.binary(max_size=300), st.integers(0, 400))
def test_no_bytes_at_all_make_the_decoder_raise_anything_but_wire_errors(noise, position):
    good = bytes(encode(make_group(8)))
    cut = position % len(good)
    for frame in (noise, good[:cut] + noise, good[:cut] + noise + good[cut + len(noise):], frame_with_body(noise)):
        try:
            Decoder(TO_HUB).decode(frame)
        except WireError:
            pass


def test_fields_appended_by_a_later_release_are_ignored_and_missing_ones_take_their_defaults():
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(Bye(3, "x")))
    assert Decoder(TO_HUB).decode(frame_with_body(msgspec.msgpack.encode([*body, "new field"]), kind=12)) == Bye(3, "x")
    beat = wire.ActorHeartbeat(1, 2, 3, 0, 0, None, 0, (), 0, 0)
    short = msgspec.msgpack.decode(msgspec.msgpack.encode(beat))[:-2]
    assert Decoder(TO_HUB).decode(frame_with_body(msgspec.msgpack.encode(short), kind=6)) == beat


def test_ids_outside_the_vocabulary_are_named():
    with pytest.raises(ContentError, match=r"token id 7 is outside the vocabulary 0\.\.6") as caught:
        unpack_ids(pack_ids([1, 7]), vocab_size=7)
    assert caught.value.check == "vocabulary"
    with pytest.raises(ContentError, match="token id -1"):
        unpack_ids(pack_ids([-1]), vocab_size=7)


def test_nan_log_probs_and_wrong_lengths_are_named():
    with pytest.raises(ContentError, match="1 of 2 log-probs are not finite"):
        unpack_logprobs(pack_logprobs([0.0, float("nan")]))
    with pytest.raises(ContentError, match="expected 12 for 3 tokens"):
        unpack_logprobs(pack_logprobs([0.0, -1.0]), num_tokens=3)
    with pytest.raises(ContentError, match="no multiple of 4"):
        unpack_ids(b"abc")


def test_arrays_are_views_of_the_frame_and_keep_their_types():
    ids = unpack_ids(pack_ids(np.array([5, 2**31 - 1])))
    assert ids.dtype == np.int32 and ids.tolist() == [5, 2**31 - 1] and not ids.flags.owndata
    logprobs = unpack_logprobs(pack_logprobs([-0.1, -2.5]))
    assert logprobs.dtype == np.float32 and not logprobs.flags.writeable


FRAMES, FIELDS, OLDER = (json.loads(GOLDEN.read_text())[key] for key in ("frames", "fields", "older"))
NEW = "run python -m tests.unit.messages.examples to record it (after an appended field: take the old frame out first)"


@pytest.mark.parametrize("name", FRAMES)
def test_an_old_frame_is_understood_and_encoded_again_to_the_same_bytes(name):
    frame = bytes.fromhex(FRAMES[name])

    if name in messages():
        message = Decoder({int(name.split()[0]): messages()[name]}).decode(frame)
        assert bytes(encode(message)) == frame
    else:
        cls = next(cls for cls in WITHOUT_KIND if cls.__name__ == name)
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(frame, type=cls)) == frame


@pytest.mark.parametrize("name", OLDER)
def test_a_frame_from_before_a_field_was_appended_is_understood(name):
    def begins(old, new):  # appended fields stand at the end of every level
        if isinstance(old, list):
            return len(old) <= len(new) and all(begins(*pair) for pair in zip(old, new, strict=False))
        return old == new

    frame = bytes.fromhex(OLDER[name])
    message = Decoder({int(name.split()[0]): messages()[name]}).decode(frame)
    old, new = (msgspec.msgpack.decode(one[PREAMBLE.size :]) for one in (frame, bytes(encode(message))))
    assert old != new and begins(old, new)


ENUM_FIELDS = [
    (name, at)
    for name, cls in messages().items() for at, field in enumerate(inspect.type_info(cls).fields)
    if isinstance(field.type, inspect.EnumType)
]


@pytest.mark.parametrize(("name", "at"), ENUM_FIELDS, ids=[f"{name}[{at}]" for name, at in ENUM_FIELDS])
def test_a_value_that_its_enum_does_not_have_is_refused(name, at):
    body = msgspec.msgpack.decode(bytes.fromhex(FRAMES[name])[PREAMBLE.size :])
    body[at] = 99
    kind, raw = int(name.split()[0]), msgspec.msgpack.encode(body)
    frame = PREAMBLE.pack(MAGIC, PROTOCOL, kind, 0, xxhash.xxh3_64_intdigest(raw)) + raw

    with pytest.raises(BodyError, match="Invalid enum value 99"):
        Decoder({kind: messages()[name]}).decode(frame)


def test_every_message_has_a_golden_frame():
    assert FRAMES.keys() == messages().keys() | {cls.__name__ for cls in WITHOUT_KIND}, NEW


def test_a_golden_frame_sets_every_field():
    # A frame that is shorter than the struct would prove nothing of the fields that it leaves to their defaults.
    assert {name: len(FRAMES[name]) for name, cls in messages().items()} == {
        name: len(frame_of(cls)) for name, cls in messages().items()
    }


@pytest.mark.parametrize("cls", structs(), ids=lambda cls: cls.__name__)
def test_fields_are_appended_and_never_moved(cls):
    assert cls.__name__ in FIELDS, NEW
    assert list(cls.__struct_fields__)[: len(FIELDS[cls.__name__])] == FIELDS[cls.__name__]
