"""The wire bytes of protocol 1: frames that an earlier release encoded, and the order of every struct's fields."""

from __future__ import annotations

import json

import msgspec
import pytest

from streamrl.messages.codec import Decoder, encode
from tests.unit.messages.examples import GOLDEN, WITHOUT_KIND, frame_of, messages, structs

FRAMES, FIELDS = (json.loads(GOLDEN.read_text())[key] for key in ("frames", "fields"))
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
