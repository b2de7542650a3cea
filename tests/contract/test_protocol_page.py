"""docs/protocol.md: its tables are the structs' fields in wire order, its example is the encoder's bytes."""

import re
from pathlib import Path

import msgspec

from streamrl import messages
from streamrl.messages import FROM_WEIGHTS, PROTOCOL, TO_ACTOR, TO_HUB, TO_WEIGHTS, Bye
from streamrl.messages.codec import encode
from tests.conform.requirements import REQUIREMENTS
from tests.contract.protocol_session import page

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
DIRECTIONS = {
    "actor to hub": TO_HUB, "hub to actor": TO_ACTOR, "actor to weights": TO_WEIGHTS, "weights to actor": FROM_WEIGHTS,
}
PARTS = (
    "VersionRef Lineage Limits Lease Sampling Member SequenceStart Span Turn Rejection Layout TensorSpec Manifest Base "
    "Offer"
).split()
ENUMS = (
    "ActorState Purpose Outcome ReturnReason MemberStatus RejectReason InstallSource StopReason PullMode ChunkStatus"
).split()


def fields(cls: type[msgspec.Struct]) -> str:
    return ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(cls))


def message_rows() -> list[str]:
    kinds = {(kind, cls) for direction in DIRECTIONS.values() for kind, cls in direction.items()}
    return [
        f"| {kind} | `{cls.__name__}` | "
        f"{', '.join(name for name, known in DIRECTIONS.items() if known.get(kind) is cls)} | {fields(cls)} |"
        for kind, cls in sorted(kinds, key=lambda row: (row[0], row[1].__name__))
    ]


def enum_row(cls: type) -> str:
    return f"| `{cls.__name__}` | {', '.join(f'{one.value} `{one.name}`' for one in cls)} |"


def test_the_page_has_the_rows_as_the_code_has_them():
    parts = [f"| `{name}` | {fields(getattr(messages, name))} |" for name in PARTS]
    rows = [*message_rows(), *parts, *(enum_row(getattr(messages, name)) for name in ENUMS)]
    assert [row for row in rows if row not in PAGE.splitlines()] == [], "docs/protocol.md needs these rows"


def test_the_page_has_every_requirement_of_the_examination():
    rows = [f"| `{name}` | {sentence} |" for name, sentence in REQUIREMENTS.items()]
    assert [line for line in PAGE.splitlines() if line in rows] == rows


def test_the_session_is_what_hub_and_actor_say():
    now = page()
    assert now == page(), "two sessions must give the same bytes"
    names = re.findall(r"^## \d+\. (\w+),", now, re.M)
    assert names[:2] == ["Hello", "Welcome"] and names[-2:] == ["Bye", "Bye"]
    kinds = {cls.__name__ for direction in DIRECTIONS.values() for cls in direction.values()}
    assert set(names) == kinds - {"Stop"}, "a session shows every message but the one that ends it early"


def test_the_example_frame_is_what_the_encoder_makes():
    example = re.search(r"```text\n((?:[0-9a-f]{2}[ \n])+)```", PAGE)
    assert example is not None
    assert bytes.fromhex(example[1].replace("\n", " ")) == bytes(encode(Bye(3, "drained")))
    assert f"protocol is {PROTOCOL}" in PAGE
