"""A stand-in for a server of OpenEnv: its routes and messages over real sockets, and one game. Not the package itself,
which `make openenv` trains with."""

from __future__ import annotations

import asyncio
import json
import threading
from types import TracebackType

from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler


class FakeOpenEnvServer:
    """Higher or lower: the number is the seed modulo 10; each guess earns 1 if right, else minus its distance / 10.

    Args:
        max_sessions: more connections are refused.
        action, observation: schemas of the fields.
        fails: what a step does in place of an answer: "close", "error", "hang" or "other", an answer that is none.
        redirects: paths that answer with the address of another server in place of themselves.
    """

    def __init__(self, *, max_sessions: int = 100, action: dict | None = None, observation: dict | None = None,
                 fails: str = "", redirects: dict[str, str] | None = None) -> None:
        self.max_sessions, self.fails, self.redirects = max_sessions, fails, redirects or {}
        self.action = action or {"guess": {"type": "integer"}}
        self.observation = observation or {"hint": {"type": "string"}}
        self.received: list[dict] = []
        self.num_sessions = self.most_sessions = self.num_refused = 0

    def __enter__(self) -> FakeOpenEnvServer:
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        async def begin() -> None:
            app = web.Application(middlewares=[self._redirect])
            app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._play)])
            self._runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            ready.set()

        def work() -> None:
            self._loop.run_until_complete(begin())
            self._loop.run_forever()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        assert ready.wait(10)
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @web.middleware
    async def _redirect(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in self.redirects:
            raise web.HTTPFound(self.redirects[request.path] + request.path)
        return await handler(request)

    async def _schema(self, request: web.Request) -> web.Response:
        common = {"metadata": {"type": "object"}}
        return web.json_response({
            "action": {"properties": {**common, **self.action}},
            "observation": {"properties": {**common, "done": {}, "reward": {}, **self.observation}}, "state": {},
        })

    async def _play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_sessions == self.max_sessions:
            self.num_refused += 1
            await socket.send_json(_error("CAPACITY_REACHED", "all sessions are taken"))
            return socket
        self.num_sessions += 1
        self.most_sessions = max(self.most_sessions, self.num_sessions)
        number = 0
        try:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                told = json.loads(message.data)
                self.received.append(told)
                if told["type"] == "reset":
                    number = told["data"]["seed"] % 10
                    await socket.send_json(self._said("0 to 9?", None))
                elif self.fails == "close":
                    return socket
                elif self.fails == "hang":
                    continue
                elif self.fails == "other":
                    await socket.send_json({"type": "observation", "data": {"hint": "?"}})
                elif self.fails == "error":
                    await socket.send_json(_error("EXECUTION_ERROR", "the game broke"))
                elif not isinstance(guess := told["data"].get("guess"), int):
                    await socket.send_json(_error("VALIDATION_ERROR", "Invalid message"))
                else:
                    hint = "higher" if guess < number else "lower"
                    reward = 1.0 if guess == number else -abs(guess - number) / 10
                    await socket.send_json(self._said(hint, reward, guess == number))
        finally:
            self.num_sessions -= 1
        return socket

    def _said(self, hint: str, reward: float | None, done: bool = False) -> dict:
        shown = {name: hint for name in self.observation}
        return {"type": "observation",
                "data": {"observation": {"metadata": {}, **shown}, "reward": reward, "done": done}}


def _error(code: str, message: str) -> dict:
    return {"type": "error", "data": {"code": code, "message": message}}
