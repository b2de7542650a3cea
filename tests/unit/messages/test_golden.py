"""The wire bytes of protocol 1: frames that an earlier release encoded, and the order of every struct's fields."""

from __future__ import annotations

import json

import msgspec
import pytest
import xxhash
from msgspec import inspect

from streamrl.errors import BodyError
from streamrl.messages import PROTOCOL
from streamrl.messages.codec import MAGIC, PREAMBLE, Decoder, encode
from tests.unit.messages.examples import GOLDEN, WITHOUT_KIND, frame_of, messages, structs

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
