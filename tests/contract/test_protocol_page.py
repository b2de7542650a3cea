"""docs/protocol.md: its example is the encoder's bytes. The generated page: every message, struct and enum is on it."""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl.messages import PROTOCOL, Bye
from streamrl.messages.codec import encode
from tests.contract.protocol_session import ENUMS, KINDS, PARTS, page

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
MESSAGES = {cls for known in KINDS.values() for cls in known.values()}


def classes_in(annotation: object) -> Iterator[type]:
    """Structs and enums that a value of this type may hold, whatever it is wrapped in."""
    for inner in typing.get_args(annotation):
        yield from classes_in(inner)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        for one in typing.get_type_hints(annotation, include_extras=True).values():
            yield from classes_in(one)
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield annotation


def test_the_tables_name_every_struct_and_enum_that_a_message_can_hold():
    held = {cls for message in MESSAGES for cls in classes_in(message)} - MESSAGES
    assert {cls.__name__ for cls in held if issubclass(cls, msgspec.Struct)} == set(PARTS)
    enums = {cls.__name__ for cls in held if issubclass(cls, enum.Enum)}
    assert enums | {"RejectReason"} == set(ENUMS), "a Rejection holds its reason as a number"


def test_the_session_is_what_hub_and_actor_say():
    now = page()
    assert now == page(), "two sessions must give the same bytes"
    names = re.findall(r"^## \d+\. (\w+),", now, re.M)
    assert names[:2] == ["Hello", "Welcome"] and names[-2:] == ["Bye", "Bye"]
    kinds = {cls.__name__ for cls in MESSAGES}
    assert set(names) == kinds - {"Stop"}, "a session shows every message but the one that ends it early"
    assert [name for name in kinds if not re.search(rf"^\| \d+ \| `{name}` \|", now, re.M)] == []


def test_the_example_frame_is_what_the_encoder_makes():
    example = re.search(r"```text\n((?:[0-9a-f]{2}[ \n])+)```", PAGE)
    assert example is not None
    assert bytes.fromhex(example[1].replace("\n", " ")) == bytes(encode(Bye(3, "drained")))
    assert f"protocol is {PROTOCOL}" in PAGE
