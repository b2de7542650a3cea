"""Common parts of the APIs: each translates a request to the options of `Chat.create`, and the answer back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion
from streamrl.errors import TaskError

Body = Mapping[str, Any]
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Form:
    """Translation of one API's requests and answers.

    Attributes:
        fields: the table of its requests.
        options: of `Chat.create`; raises TaskError for what is not served.
        answer: the whole answer as JSON.
        events: the whole answer as server-sent events; None: the API does not stream.
    """

    fields: type[Struct]
    options: Callable[[Body, Session], dict[str, Any]]
    answer: Callable[[ChatCompletion, Body, Session], dict[str, Any]]
    events: Callable[[Mapping[str, Any], Body], Iterator[bytes]] | None


def picked(body: Body, names: Mapping[str, str]) -> dict[str, Any]:
    """These fields of a request under their names in `Chat.create`."""
    return {names[name]: value for name, value in body.items() if name in names}


def text_of(content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """A content that is a text, or a list of parts of these kinds. Raises TaskError for one that holds another part."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise TaskError(f"a part of type {part.get('type')!r} cannot be read here: give parts of type {kinds[0]}")
    return "".join(part["text"] for part in content)


def ruled(options: dict[str, Any], sampling: Mapping[str, Any]) -> list[str]:
    """Replace what the run's settings replace; returns it as `name=value`."""
    changed = []
    if options.get("train", True):
        for name in SAMPLING:
            given = options.pop(name, None)
            if given is not None and given != sampling[name]:
                changed.append(f"{name}={sampling[name]}")
    for name in ("max_tokens", "max_completion_tokens"):
        given = options.get(name)
        if isinstance(given, int) and given > sampling["max_new_tokens"]:
            changed.append(f"{name}={sampling['max_new_tokens']}")
    return changed


def event(value: Mapping[str, Any], *, named: bool = False) -> bytes:
    """A server-sent event; `named` by its type, as Anthropic's and those of responses are."""
    name = f"event: {value['type']}\n" if named else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()
