"""Episodes that programs outside play (`env.agent=outside`), under the administration key.

    POST   /sessions               {"wait_s": 30}: the next episode, with its record, an address and a key
    GET    /sessions/<id>          how it stands
    POST   /sessions/<id>/reward   {"reward": 1.0}, as POST /v1/reward
    GET    /sessions/<id>/trace    its tokens, log-probs and versions so far
    DELETE /sessions/<id>          the episode is over; {"failed": "why"} loses its trajectory

A session is a lease of the hub: what was opened and left alone is lost after `env.step_timeout_s`, and leased again.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from actors.endpoint.access import ApiError, is_admin, object_of, session_of
from actors.endpoint.sessions import Session, Sessions
from envs.reward_values import as_step
from streamrl.errors import TaskError

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
