"""Access control: the session of a request, by its key, or by its name under the administration key.

A name stands in the path, /sessions/<id>/v1/..., or in the header X-Session-ID. A session's own key opens it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from actors.endpoint.reading import read_object
from actors.endpoint.sessions import Session, Sessions
from streamrl.errors import TaskError

T = TypeVar("T")

MAX_NAME_CHARS = 26
"""Longest name of an agent: its reward stands among the scores as `agent_NAME`, a word of the messages."""
MAX_BODY_BYTES, SMALLEST_LIMIT, BYTES_PER_TOKEN = 16 << 20, 1 << 20, 64
"""Most bytes of a body: by the tokens of the longest prompt, and no fewer than the second, no more than the first."""
BODY_S = 60.0
"""Longest wait for the rest of a request that has begun; a client that hangs is told so and loses its connection."""


class ApiError(Exception):
    """Refuses a request: status, code and message of its answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def session_of(sessions: Sessions, request: web.Request) -> Session:
    path = request.match_info.get("session")
    name = path or request.headers.get("X-Session-ID", "")
    keys = _keys(request)
    for key in keys:  # SDKs send both, if a variable of another service is set
        if (session := sessions.get(key)) is not None:
            # Harnesses put names of their own into the header, so an unknown one says nothing.
            if sessions.named(name) not in (session, None) or path not in (session.id, None):
                raise ApiError(403, "foreign_session", "this key is that of another session: take each with its own")
            return session
    if is_admin(sessions, request):
        return _named(sessions, name)
    if any(sessions.is_over(key) for key in keys):
        raise over()
    raise ApiError(
        401, "invalid_api_key", "this key names no session: an agent must take OPENAI_API_KEY as it got it, with the "
        "OPENAI_BASE_URL that came with it; streamrl serve takes its --api-key"
    )


def agent_of(request: web.Request) -> str:
    """Name of the agent that asks, "" where the call names none."""
    name = request.headers.get("X-Agent-ID", "")
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ApiError(
            400, "invalid_request", f"X-Agent-ID is {name!r:.60}: give a name of at most {MAX_NAME_CHARS} printable "
            "characters"
        )
    return name


def is_admin(sessions: Sessions, request: web.Request) -> bool:
    return any(sessions.is_admin(key) for key in _keys(request))


def over() -> ApiError:
    return ApiError(410, "session_over", "the session is over because its agent ended or its lease was lost: stop")


def max_body_bytes(max_tokens: int) -> int:
    """Bytes of the largest body that a prompt of so many tokens may come in."""
    return min(MAX_BODY_BYTES, SMALLEST_LIMIT + BYTES_PER_TOKEN * max_tokens)


async def body_of(request: web.Request, limit: int = SMALLEST_LIMIT) -> bytes:
    """The bytes of a body. Raises ApiError for more than `limit`, and for one that does not come whole."""
    raw, size, declared = bytearray(), 0, request.content_length or 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():  # also of one that is refused: its client reads no answer yet
                size += len(part)
                if max(size, declared) <= limit:
                    raw += part
                elif size > MAX_BODY_BYTES:
                    break
    except TimeoutError as error:
        raise ApiError(
            408, "request_timeout", f"the rest of the body did not come within {BODY_S:g} s: give it whole"
        ) from error
    except web.RequestPayloadError as error:
        raise ApiError(
            400, "invalid_request", f"the body is not in its Content-Encoding, leave it out: {error!r:.100}"
        ) from error
    if max(size, declared) > limit:
        raise ApiError(
            413, "invalid_request", f"the body has more than {limit} bytes, and no prompt that fits has as many: send "
            "less, or raise rollout.max_prompt_tokens"
        )
    return bytes(raw)


async def object_of(request: web.Request) -> dict[str, Any]:
    """The JSON object of a small request."""
    return refused_by_name(read_object, await body_of(request))


def refused_by_name(read: Callable[..., T], *given: Any) -> T:
    """Call `read` on a request. Raises ApiError for a request that it cannot read or does not serve."""
    try:
        return read(*given)
    except TaskError as error:
        raise ApiError(400, "invalid_request", str(error)) from error
    except KeyError as error:
        raise ApiError(400, "invalid_request", f"a part of it has no {error}: see the form of this API") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ApiError(
            400, "invalid_request", f"the body cannot be read, see the form of this API: {type(error).__name__} {error}"
        ) from error


def _keys(request: web.Request) -> tuple[str, str]:
    given = request.headers.get("Authorization", "")
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else given, request.headers.get("x-api-key", "")


def _named(sessions: Sessions, name: str) -> Session:
    if (session := sessions.named(name)) is not None:
        return session
    if sessions.is_over(name):
        raise over()
    raise ApiError(
        404, "unknown_session", f"no session is named {name!r:.60}: give the id that POST /sessions answered, in the "
        "path or as X-Session-ID"
    )
