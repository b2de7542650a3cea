"""Requests drawn from the tables of `actors.endpoint.fields`: legal and illegal values of every field, mixed."""

import json
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from actors.endpoint import fields

ROUTES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": fields.ChatFields, "/v1/responses": fields.ResponsesFields,
    "/v1/messages": fields.MessagesFields, "/v1/messages/count_tokens": fields.MessagesFields,
    "/inference/v1/generate": fields.TokensFields,
}
WORDS = (
    "abc", "", "q" * 70, "hello", "</think>", '<tool_call>{"name": "add", "arguments": {"b": 2}}</tool_call>', "\x00",
    "é漢🙂", "\ud800", "a b\nc",
)
ILLEGAL: tuple[Any, ...] = (
    2**70, -(2**63) - 1, 10**400, -1, 0, 1e308, 1e-320, -0.5, float("nan"), float("inf"), True, None, "", "x" * 2000,
    [], {}, [[]], [None], {"": None}, ["", ""], [1], "0", "null",
)
MIXED_IN = 0.12
"""Share of fields whose value is anything."""


def draw_body(random: Random, table: type[msgspec.Struct]) -> bytes:
    """A body for a request of this table; one in thirty is no JSON object of it at all."""
    broken = random.random()
    if broken < 0.03:
        return random.choice((
            b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":' * 3000, b"[" * 150_000, b'{"messages": NaN}',
            b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        ))
    bad = random.random() < 0.6  # the others are legal throughout
    body = _struct(random, table, bad)
    if random.random() < 0.1:
        body[random.choice(("verbosity", "x\r\ny", "reasoning_effort", "é"))] = _any(random, 3)
    return json.dumps(body).encode()


def _struct(random: Random, table: type[msgspec.Struct], bad: bool) -> dict[str, Any]:
    found = {}
    for field in inspect.type_info(table).fields:
        if not field.required and random.random() < 0.75 and field.name != "max_tokens":
            continue
        if bad and random.random() < MIXED_IN:
            if random.random() < 0.9:
                found[field.name] = random.choice(ILLEGAL) if random.random() < 0.9 else _deep(random)
            continue
        found[field.name] = _value(random, field.type, bad)
    return found


def _value(random: Random, kind: Any, bad: bool) -> Any:
    match kind:
        case inspect.Metadata():
            return _value(random, kind.type, bad)
        case inspect.UnionType():
            return _value(random, random.choice(kind.types), bad)
        case inspect.LiteralType():
            return random.choice(kind.values)
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else -9, kind.le if kind.le is not None else 9
            return random.choice((low, min(low + 3, high), min(low + 30, high), min(high, low + 7)))
        case inspect.FloatType():
            low = kind.gt if kind.gt is not None else kind.ge if kind.ge is not None else -9.0
            high = kind.le if kind.le is not None else 9.0
            return random.choice((high, low + (high - low) * (random.random() or 1.0), int(high), low + 1e-320))
        case inspect.StrType():
            return random.choice([one for one in WORDS if bad or one != "\ud800"])
        case inspect.ListType():
            most = 4 if kind.max_length is None else min(kind.max_length, 4)
            size = random.randint(kind.min_length or 0, most)
            return [_value(random, kind.item_type, bad) for _ in range(size)]
        case inspect.DictType():
            return {} if kind.max_length == 0 else {random.choice(WORDS[:5]): _value(random, kind.value_type, bad)}
        case inspect.StructType():
            return _struct(random, kind.cls, bad)
        case inspect.NoneType():
            return None
    return _any(random, 3)


def _any(random: Random, depth: int) -> Any:
    if depth and random.random() < 0.3:
        return [_any(random, depth - 1) for _ in range(random.randrange(3))]
    return random.choice((*WORDS[:4], 1, 0.5, None, True, {}, {"a": [1]}, 2**63))


def _deep(random: Random) -> Any:
    value: Any = []
    for _ in range(random.choice((10, 60, 70, 300))):
        value = [value]
    return value
