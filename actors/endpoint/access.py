"""Who asks for what: the session of a request, by its key, or by its name under the administration key.

A name stands in the path, /sessions/<id>/v1/..., or in the header X-Session-ID. A session's own key opens it alone.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from actors.endpoint.sessions import Session, Sessions

MAX_NAME_CHARS = 26
"""Longest name of an agent: its reward stands among the scores as `agent_NAME`, a word of the messages."""
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
    return ApiError(410, "session_over", "the session is over: its agent ended, or its lease is gone: stop")


async def body_of(request: web.Request) -> tuple[dict[str, Any], bytes]:
    """The JSON object of a request, and its bytes."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.read()
    except TimeoutError as error:
        raise ApiError(
            408, "request_timeout", f"the rest of the body did not come within {BODY_S:g} s: give it whole"
        ) from error
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise ApiError(400, "invalid_request", f"the body is no JSON, give an object of it: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_request", f"the body is {raw[:60]!r}: give a JSON object")
    return body, raw


def _keys(request: web.Request) -> tuple[str, str]:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return bearer, request.headers.get("x-api-key", "")


def _named(sessions: Sessions, name: str) -> Session:
    if (session := sessions.named(name)) is not None:
        return session
    if sessions.is_over(name):
        raise over()
    raise ApiError(
        404, "unknown_session", f"no session is named {name!r:.60}: give the id that POST /sessions answered, in the "
        "path or as X-Session-ID"
    )
