"""Reading of a request: its JSON, and every field by the table of its API (`fields`); what is illegal is named."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from actors.endpoint.fields import DEFAULT
from streamrl.errors import RequestError

MAX_DEPTH = 64
"""Levels of nested lists and objects: later steps walk them by recursion."""
MAX_INSIDE = 100_000
"""Lists and objects in a body; a message is two. Each is scanned by the garbage collector many times."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # to its end, also where that is missing
_PATH = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)  # the last one: the text before it may hold others


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises RequestError for anything else, and for values that no machine word holds."""
    body = _decoded(raw)
    _check_values(body)
    return body


def checked(raw: bytes, fields: type[msgspec.Struct], route: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of a request that are given, and the names of those that are not in the table.

    Raises RequestError for a field that is illegal, or asks for what is not served.
    """
    body = _decoded(raw)
    try:
        msgspec.convert(body, fields)
    except msgspec.ValidationError as error:
        raise RequestError(f"{route} {_refusal(body, fields, str(error))}") from error
    _check_values(body)
    known = set(fields.__struct_fields__)
    given = {name: value for name, value in body.items() if name in known and value is not None}
    return given, sorted(body.keys() - known)


def _decoded(raw: bytes) -> dict[str, Any]:
    if _num_inside(raw) > MAX_INSIDE and _num_inside(_TEXT.sub(b"", raw)) > MAX_INSIDE:
        raise RequestError(f"the body holds more than {MAX_INSIDE} lists and objects: give fewer")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON, give a JSON object: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is {raw[:60]!r}: give a JSON object")
    return body


def _num_inside(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _check_values(body: dict[str, Any]) -> None:
    left: list[tuple[Any, int, str]] = [(value, 1, name) for name, value in body.items()]
    while left:
        value, depth, name = left.pop()
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 64:
                raise RequestError(f"{name:.60} holds {str(value)[:40]}: give integers of at most 64 bits")
        elif isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise RequestError(f"{name:.60} is nested more than {MAX_DEPTH} times: give it fewer levels")
            named = value.items() if isinstance(value, dict) else ((name, one) for one in value)
            left += [(one, depth + 1, inside) for inside, one in named if not isinstance(one, str)]


def _refusal(body: dict[str, Any], fields: type[msgspec.Struct], said: str) -> str:
    """The sentence of a refusal: the field, the value given, and what is allowed."""
    match = _PATH.fullmatch(said)
    problem, path = (match[1], (match[2] or "").lstrip(".")) if match else (said, "")
    problem = f"{problem:.120}"  # it may repeat a value of any length
    if not path:
        return f"lacks something: {problem}, see the form of this API"
    value = _shown(_at(body, path))
    *_, field = around = _fields_at(fields, path)
    says, use = next((one["description"], one.get("use")) for one in reversed(around) if one.get("description"))
    if use == DEFAULT:
        return f"does not take {path}={value}: here it can only be {says}"
    if path.endswith(".type"):
        allowed = " or ".join(map(str, field["values"])) or "a text"
        return f"cannot read {path.removesuffix('.type')}, of type {value.replace(chr(34), chr(39))}: give {allowed}"
    if "." in path.replace("sampling_params.", "") or "[" in path:
        return f"got {path}={value}: {problem}, see the form of this API; give {says}"
    return f"got {path}={value}: give {says}"


def _shown(value: Any) -> str:
    """The beginning of a value, which may be large and nested."""
    if isinstance(value, dict | list):
        return reprlib.repr(value)[:60]
    return json.dumps(value[:60] if isinstance(value, str) else value)[:60]


def _steps(path: str) -> Iterator[str | int]:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        yield name or int(index)


def _at(value: Any, path: str) -> Any:
    """The value at a path, or the innermost around it."""
    for step in _steps(path):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            break
    return value


def _fields_at(fields: type[msgspec.Struct], path: str) -> list[dict[str, Any]]:
    """The entries of a table that a path leads through."""
    found: list[dict[str, Any]] = []
    current: type[msgspec.Struct] | None = fields
    for name in _steps(path):
        if isinstance(name, str) and current is not None and name in table(current):
            found.append(table(current)[name])
            current = found[-1]["struct"]
    return found


@cache
def table(fields: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Description and use of each field by its name, the struct that it holds and the values that it can have."""
    found = {}
    for field in inspect.type_info(fields).fields:
        one: dict[str, Any] = {"struct": next(_structs(field.type), None), "values": _values(field.type)}
        for metadata in _metadata(field.type):
            one |= {"description": (metadata.extra_json_schema or {}).get("description"), **(metadata.extra or {})}
        found[field.name] = one
    return found


def _metadata(kind: Any) -> Iterator[inspect.Metadata]:
    """The annotations of a type, the outermost last."""
    for member in kind.types if isinstance(kind, inspect.UnionType) else ():
        yield from _metadata(member)
    if isinstance(kind, inspect.Metadata):
        yield from _metadata(kind.type)
        yield kind


def _values(kind: Any) -> list[Any]:
    """The values of a field that can have a few only."""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [value for one in members if isinstance(one, inspect.LiteralType) for value in one.values]


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs in a type, also those of its lists."""
    if isinstance(kind, inspect.Metadata):
        yield from _structs(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _structs(member)
    elif isinstance(kind, inspect.ListType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        yield kind.cls
