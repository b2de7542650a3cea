"""The HTTP side of agents' sessions, in the actor's own process and on its event loop.

    POST /v1/chat/completions     a turn of the model, recorded; also /v1/responses, /v1/messages
    POST /inference/v1/generate   the same with token ids
    POST /v1/messages/count_tokens
    GET  /v1/models               the one model
    POST /v1/reward               {"reward": 1.0}, or several named parts: what the episode earned

The key of a request, `Authorization: Bearer` or `x-api-key`, names its session; `access` has the other ways, `control`
what the administration key opens. Errors have the form of the API that was called; SDKs repeat none that would fail
again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from actors.endpoint.access import ApiError, agent_of, body_of, over, session_of
from actors.endpoint.chat_json import CHAT
from actors.endpoint.control import Control, take_reward
from actors.endpoint.form import Body, Form, ruled
from actors.endpoint.messages_json import MESSAGES, error_json
from actors.endpoint.messages_json import options as message_options
from actors.endpoint.responses_json import RESPONSES
from actors.endpoint.sessions import Answer, Session, Sessions
from actors.endpoint.tokens_json import TOKENS
from actors.trajectory.rules import PromptTooLongError
from streamrl.errors import EngineError, EpisodeFullError, TaskError
from streamrl.transport.peers import raise_descriptor_limit

FORMS = {
    "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}
MAX_BODY_BYTES = 16 << 20
"""Of a request; the longest context of today's models is a tenth of it."""
MAX_CONNECTING = 4096
"""Connections that wait to be accepted: all agents of an actor may start at once; one left out waits a second."""
REPEATED = "x-stainless-retry-count"
"""Header with which the SDKs of OpenAI and Anthropic number their repetitions of a call."""


async def serve(
    sessions: Sessions, host: str, port: int, *, control: bool = False
) -> tuple[web.AppRunner, int]:
    """Listen; returns what ends it (`cleanup`) and the port. Raises OSError for an address that cannot be had.

    Args:
        control: also serve what the administration key opens.
    """
    raise_descriptor_limit()  # each connection is one
    server = _Server(sessions)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    for prefix in ("", "/sessions/{session}"):
        app.add_routes([web.post(prefix + path, partial(server.ask, form)) for path, form in FORMS.items()])
        app.add_routes([
            web.post(f"{prefix}/v1/messages/count_tokens", server.count), web.get(f"{prefix}/v1/models", server.models),
            web.post(f"{prefix}/v1/reward", partial(take_reward, sessions)),
        ])
    if control:
        app.add_routes([web.post("/sessions/{session}/reward", partial(take_reward, sessions))])
        app.add_routes(Control(sessions).routes())
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=MAX_CONNECTING)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, runner.addresses[0][1]


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
        session, (body, raw) = session_of(self._sessions, request), await body_of(request)
        options = _options(form.options, body, session)
        if not session.recorded:
            options["train"] = False
        if agent := agent_of(request):
            options["agent"] = agent
        changed = ruled(options, session.client.sampling)
        marked = request.headers.get(REPEATED, "0") != "0"
        asked = f"{request.path} {agent}".encode() + raw
        answer = session.ask(asked, options, partial(_gone, request), marked=marked)
        whole = form.answer(await _awaited(session, answer), body, session)
        streams = form.events is not None and body.get("stream")
        response = web.StreamResponse(headers={"X-Streamrl-Sampling": ", ".join(changed)} if changed else None)
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
        session, (body, _) = session_of(self._sessions, request), await body_of(request)
        options = _options(message_options, body, session)
        count = _options(lambda *_: session.client.count(options["messages"], options["tools"]), body, session)
        return web.json_response({"input_tokens": count})


def _gone(request: web.Request) -> bool:
    """Whether the client that asked has left."""
    return request.transport is None or request.transport.is_closing()


def _options(translate: Callable[[Body, Session], Any], body: Body, session: Session) -> Any:
    """The request in the form of chat; what is not served is refused by name."""
    try:
        return translate(body, session)
    except TaskError as error:
        raise ApiError(400, "invalid_request", str(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ApiError(
            400, "invalid_request", f"the body cannot be read, see the form of this API: {type(error).__name__} {error}"
        ) from error


async def _awaited(session: Session, answer: Answer) -> Any:
    """The completion; the generation goes on if this request ends, for the one that repeats it."""
    try:
        return await asyncio.shield(answer.task)
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
