"""The HTTP side of agents' sessions, in the actor's own process and on its event loop.

    POST /v1/chat/completions     a turn of the model, recorded; also /v1/responses, /v1/messages
    POST /inference/v1/generate   the same with token ids
    POST /v1/messages/count_tokens
    GET  /v1/models               the one model
    POST /v1/reward               {"reward": 1.0}, or several named parts: what the episode earned

Episodes that programs outside play (`env.agent=outside`), under the administration key:

    POST   /sessions               {"wait_s": 30}: the next episode, with its record, an address and a key
    GET    /sessions/<id>          how it stands
    POST   /sessions/<id>/reward   {"reward": 1.0}, as POST /v1/reward
    GET    /sessions/<id>/trace    its tokens, log-probs and versions so far
    DELETE /sessions/<id>          the episode is over; {"failed": "why"} loses its trajectory

A session is a lease of the hub: what was opened and left alone is lost after `env.step_timeout_s`, and leased again.

The key of a request, `Authorization: Bearer` or `x-api-key`, names its session; `access` has the other ways. Errors
have the form of the API that was called; SDKs repeat none that would fail again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any

from aiohttp import web

from actors.endpoint.access import (
    ApiError,
    agent_of,
    body_of,
    is_admin,
    max_body_bytes,
    object_of,
    over,
    refused_by_name,
    session_of,
)
from actors.endpoint.dialects import CHAT, MESSAGES, RESPONSES, TOKENS, Form, error_json, ruled
from actors.endpoint.reading import checked
from actors.endpoint.sessions import Session, Sessions
from actors.trajectory.client import off_loop
from actors.trajectory.rules import PromptTooLongError
from envs.json_service import start_site
from envs.reward_values import as_step
from streamrl.config.addresses import is_loopback
from streamrl.errors import EngineError, EpisodeFullError, TaskError
from streamrl.transport.peers import raise_descriptor_limit

DEFAULT_WAIT_S, MAX_WAIT_S = 30.0, 600.0


async def take_reward(sessions: Sessions, request: web.Request) -> web.StreamResponse:
    session, given = session_of(sessions, request), await object_of(request)
    if not session.recorded:
        raise ApiError(404, "invalid_request", "nothing is trained here: leave the reward out")
    try:
        as_step(given, "the request")
    except TaskError as error:
        raise ApiError(400, "invalid_reward", str(error)) from error
    session.reward = given
    return web.json_response({})


class Control:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def routes(self) -> list[web.RouteDef]:
        one = "/sessions/{session}"
        return [
            web.post("/sessions", self.open), web.get(one, self.show), web.delete(one, self.end),
            web.get(f"{one}/trace", self.trace),
        ]

    async def open(self, request: web.Request) -> web.StreamResponse:
        if not is_admin(self._sessions, request):
            raise ApiError(401, "invalid_api_key", "set the key of actors.endpoint.admin_key_env")
        wait_s = (await _optional_body(request)).get("wait_s", DEFAULT_WAIT_S)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise ApiError(400, "invalid_request", f"wait_s={str(wait_s):.20}: give seconds from 0 to {MAX_WAIT_S:g}")
        try:
            session = await self._sessions.take(wait_s, lambda: request.transport is None)
        except TimeoutError as error:
            raise ApiError(
                503, "no_session", f"no episode waits for a program after {wait_s:g} s, ask again: every lease of this "
                "actor is taken, or the run has ended, or it has another env.agent than outside"
            ) from error
        told = {**_shown(session), "base_url": session.base_url, "api_key": session.api_key}
        return web.json_response(told, status=201)

    async def show(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_shown(session_of(self._sessions, request)))

    async def trace(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"sequences": session_of(self._sessions, request).client.trace()})

    async def end(self, request: web.Request) -> web.StreamResponse:
        session, failed = session_of(self._sessions, request), (await _optional_body(request)).get("failed") or ""
        if not isinstance(failed, str):
            raise ApiError(400, "invalid_request", f"failed={failed!r:.40}: say in a text why, or leave it out")
        if session.ended is None:
            raise ApiError(409, "invalid_request", "this session ends with its agent: leave it")
        if not session.ended.done():
            session.ended.set_result(failed)
        return web.json_response({})


def _shown(session: Session) -> dict[str, Any]:
    client = session.client
    return {
        "id": session.id, "record": session.record, "reward": session.reward, "answer": session.answer,
        "num_turns_left": client.num_turns_left, "num_tokens_left": client.num_tokens_left,
    }


async def _optional_body(request: web.Request) -> dict[str, Any]:
    return await object_of(request) if request.can_read_body else {}


_log = logging.getLogger("streamrl.actor")
FORMS = {
    "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}
MAX_CONNECTING = 4096
"""Connections that wait to be accepted: all agents of an actor may start at once; one left out waits a second."""
REPEATED = "x-stainless-retry-count"
"""Header with which the SDKs of OpenAI and Anthropic number their repetitions of a call."""


async def serve(
    sessions: Sessions, host: str, port: int, *, control: bool = False, keyless: bool = False
) -> tuple[web.AppRunner, int]:
    """Listen; returns what ends it (`cleanup`) and the port. Raises OSError for an address that cannot be had.

    Args:
        control: also serve what the administration key opens.
        keyless: any key is taken, and so only programs of this machine are served.
    """
    raise_descriptor_limit()  # each connection is one
    server = _Server(sessions)
    app = web.Application(middlewares=[_errors, _own_machine] if keyless else [_errors])
    for prefix in ("", "/sessions/{session}"):
        app.add_routes([web.post(prefix + path, partial(server.ask, form)) for path, form in FORMS.items()])
        app.add_routes([
            web.post(f"{prefix}/v1/messages/count_tokens", server.count), web.get(f"{prefix}/v1/models", server.models),
            web.post(f"{prefix}/v1/reward", partial(take_reward, sessions)),
        ])
    if control:
        app.add_routes([web.post("/sessions/{session}/reward", partial(take_reward, sessions))])
        app.add_routes(Control(sessions).routes())
    runner = web.AppRunner(app, access_log=None, logger=_quiet(), handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await start_site(runner, host, port, backlog=MAX_CONNECTING)
    except OSError:
        await runner.cleanup()
        raise
    return runner, runner.addresses[0][1]


def _quiet() -> logging.Logger:
    """A logger for the library: what is no HTTP is counted, and has no traceback for each request."""
    logger, seen = logging.getLogger("streamrl.actor.http"), count(1)

    def filtered(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        number, error = next(seen), record.exc_info[1] if record.exc_info else None
        record.msg, record.args = f"HTTP failure {number}: {record.getMessage()}: {error!r:.200}", ()
        record.exc_info = record.exc_text = None
        return number & (number - 1) == 0  # the 1st, 2nd, 4th, 8th ...

    logger.filters[:] = [filtered]
    return logger


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every refusal as JSON, also those of the library: no such path, a method, a body that is too large."""
    try:
        return await handler(request)
    except ApiError as error:
        status, code, message = error.status, error.code, str(error)
    except web.HTTPException as error:
        status, code, message = error.status, "invalid_request", f"{request.method} {request.path}: {error.reason}"
    except ConnectionError:  # its client has gone
        raise
    except Exception as error:
        _log.exception("a request to %s failed", request.path)
        status, code, message = 500, "internal_error", f"{type(error).__name__}: {error}"
    if "/v1/messages" in request.path:
        return web.json_response(error_json(status, code, message), status=status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)


class _Server:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def models(self, request: web.Request) -> web.StreamResponse:
        session = session_of(self._sessions, request)
        one = {"id": "policy", "object": "model", "owned_by": "streamrl", "max_model_len": session.client.max_tokens}
        return web.json_response({"object": "list", "data": [one]})

    async def ask(self, form: Form, request: web.Request) -> web.StreamResponse:
        session = session_of(self._sessions, request)
        raw, body, unknown, options = await self._read(form, session, request)
        if not session.recorded:
            options["train"] = False
        if agent := agent_of(request):
            options["agent"] = agent
        changed = ruled(options, session.client.sampling)
        marked = request.headers.get(REPEATED, "0") != "0"
        asked = f"{request.path} {agent}".encode() + raw
        answer = session.ask(asked, options, partial(_gone, request), marked=marked)
        del raw, asked, options  # it may wait for long, and the largest are many megabytes
        # The generation goes on if this request ends, for the one that repeats it.
        whole = form.answer(await _awaited(session, asyncio.shield(answer.task)), body, session)
        streams = form.events is not None and body.get("stream")
        told = {"X-Streamrl-Sampling": ", ".join(changed), "X-Streamrl-Ignored": _header(unknown)}
        response = web.StreamResponse(headers={name: text for name, text in told.items() if text})
        response.content_type = "text/event-stream" if streams else "application/json"
        # Sent here, and not by the library, to know that it was.
        await response.prepare(request)
        for part in form.events(whole, body) if streams else (json.dumps(whole).encode(),):
            await response.write(part)
        await response.write_eof()
        answer.delivered = True
        return response

    async def count(self, request: web.Request) -> web.StreamResponse:
        """The tokens of a prompt, by the count of Anthropic's; it is not recorded."""
        session = session_of(self._sessions, request)
        _, _, _, options = await self._read(MESSAGES, session, request)
        count = await _awaited(session, session.client.count(options["messages"], options["tools"]))
        return web.json_response({"input_tokens": count})

    async def _read(
        self, form: Form, session: Session, request: web.Request
    ) -> tuple[bytes, dict[str, Any], list[str], dict[str, Any]]:
        """A body, its fields, the names of those that are not known, and the options of `Chat.create`."""
        raw = await body_of(request, max_body_bytes(session.client.max_tokens))
        route = f"{request.method} {request.path}"

        def read() -> tuple[bytes, dict[str, Any], list[str], dict[str, Any]]:
            body, unknown = checked(raw, form.fields, route)
            return raw, body, unknown, form.options(body, session)

        return await off_loop(len(raw), partial(refused_by_name, read))


def _gone(request: web.Request) -> bool:
    """Whether the client that asked has left."""
    return request.transport is None or request.transport.is_closing()


def _header(names: list[str]) -> str:
    """Names as the value of a header."""
    return ", ".join("".join(c if c.isprintable() and c.isascii() else "?" for c in name[:40]) for name in names[:20])


@web.middleware
async def _own_machine(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuses what a page of another site can send from this machine: its own Host, its Origin, a simple body."""
    origins = [one.partition("://")[2] for one in request.headers.getall("Origin", ())]
    if not all(map(_is_local, [request.headers.get("Host", ""), *origins])):
        raise ApiError(
            403, "foreign_origin", "without a key only programs of this machine are served, by the name localhost or a "
            "loopback address: take --api-key to serve others"
        )
    if request.body_exists and request.content_type != "application/json":
        raise ApiError(
            415, "invalid_request", f"the body is {request.content_type}: set Content-Type: application/json"
        )
    return await handler(request)


def _is_local(netloc: str) -> bool:
    """Whether HOST or HOST:PORT is this machine's loopback."""
    host = netloc if netloc.endswith("]") or ":" not in netloc else netloc.rpartition(":")[0]
    return is_loopback(f"tcp://{host.lower()}:0")


async def _awaited(session: Session, answer: Awaitable[Any]) -> Any:
    """The answer of the client; what it raises is told by its kind."""
    try:
        return await answer
    except EpisodeFullError as error:
        raise ApiError(400, "episode_full", str(error)) from error
    except PromptTooLongError as error:
        raise ApiError(400, "context_length_exceeded", str(error)) from error
    except TaskError as error:
        raise ApiError(400, "invalid_request", str(error)) from error
    except EngineError as error:
        raise ApiError(503, "engine_error", str(error)) from error
    except asyncio.CancelledError:
        if session.over:
            raise over() from None
        raise
    except Exception as error:  # a chat template is the model's own program and may raise anything
        raise ApiError(400, "invalid_request", f"{type(error).__name__}: {error}") from error
