"""One instance of any wire struct with every field set, from its types alone: `python -m tests.unit.messages.examples`
appends the frames of new messages to the golden file, and never changes one that is there."""

import json
from itertools import count
from pathlib import Path

import msgspec
from msgspec import inspect

from streamrl.messages import DeltaIndex, Message
from streamrl.messages.codec import encode
from streamrl.messages.validate import MemberSummary, VersionTokens

GOLDEN = Path(__file__).parent / "golden" / "protocol_1.json"
WITHOUT_KIND = (DeltaIndex, MemberSummary)
"""Structs that are stored or sent as the payload of something else."""


def example_of(cls: type) -> msgspec.Struct:
    """Distinct numbers in field order, the largest value of every enum, one or two items in every list."""
    return msgspec.convert(_value(inspect.type_info(cls), count(1)), cls)


def _value(kind: inspect.Type, numbers: count) -> object:
    match kind:
        case inspect.StructType(fields=fields):
            return [_value(field.type, numbers) for field in fields]
        case inspect.TupleType(item_types=items):
            return [_value(item, numbers) for item in items]
        case inspect.VarTupleType(item_type=item):
            return [_value(item, numbers), _value(item, numbers)]
        case inspect.DictType(key_type=key, value_type=value):
            return {_value(key, numbers): _value(value, numbers)}
        case inspect.UnionType(types=types):
            return _value(next(one for one in types if not isinstance(one, inspect.NoneType)), numbers)
        case inspect.EnumType(cls=cls):
            return max(cls)
        case inspect.IntType(le=int(largest)):
            return largest
        case inspect.BytesType(min_length=length):
            return bytes([next(numbers)]) * (length or 3)
    leaf = next(numbers)
    return {inspect.BoolType: True, inspect.StrType: f"s{leaf}", inspect.FloatType: leaf + 0.5}.get(type(kind), leaf)


def messages() -> dict[str, type[Message]]:
    """Every message under the name of its golden frame, `<kind> <class>`."""
    return {f"{cls.KIND} {cls.__name__}": cls for cls in _descendants(Message) if hasattr(cls, "KIND")}


def structs() -> list[type[msgspec.Struct]]:
    """Everything that crosses a process, messages and what they hold."""
    return [*_descendants(Message), VersionTokens, MemberSummary]


def _descendants(cls: type) -> list[type]:
    return [one for child in cls.__subclasses__() for one in (child, *_descendants(child))]


def frame_of(cls: type) -> str:
    example = example_of(cls)
    return (encode(example) if isinstance(example, Message) and cls not in WITHOUT_KIND
            else msgspec.msgpack.encode(example)).hex()


if __name__ == "__main__":
    golden = json.loads(GOLDEN.read_text())
    for name, cls in (messages() | {cls.__name__: cls for cls in WITHOUT_KIND}).items():
        golden["frames"].setdefault(name, frame_of(cls))
    for cls in structs():
        golden["fields"].setdefault(cls.__name__, list(cls.__struct_fields__))
    tables = ",\n".join(
        f'"{key}": {{\n' + ",\n".join(f' "{name}": {json.dumps(one)}' for name, one in table.items()) + "\n}"
        for key, table in golden.items()
    )
    GOLDEN.write_text(f"{{\n{tables}\n}}\n")
