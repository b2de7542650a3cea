"""A small service over HTTP, without authentication: JSON in, JSON out, on every path."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

MAX_CONNECTING = 512
"""Connections that are not yet accepted: a whole group of answers is scored at once."""


async def start_site(runner: web.AppRunner, host: str, port: int, *, backlog: int = MAX_CONNECTING) -> None:
    """Listen at an address. Raises OSError if it cannot be had, or is none."""
    try:
        await web.TCPSite(runner, host, port, backlog=backlog).start()
    except (OverflowError, UnicodeError) as error:  # of a port, and of a name
        raise OSError(str(error)) from error


@asynccontextmanager
async def listening(
    answer: Callable[[web.Request, Any], Awaitable[tuple[int, Any]]], host: str, port: int, *, max_bytes: int
) -> AsyncIterator[tuple[str, int]]:
    """Serve `answer`, request and body to status and content, inside; gives the address: port 0 takes a free one."""

    async def handle(request: web.Request) -> web.Response:
        try:
            raw = await request.read()
            body = json.loads(raw) if raw else None
        except web.HTTPRequestEntityTooLarge:
            status, content = 413, {"error": f"the body has more than {max_bytes} bytes: give fewer"}
        except (ValueError, RecursionError) as error:
            status, content = 400, {"error": f"the body is no JSON that can be read: {error}"}
        else:
            status, content = await answer(request, body)
        return web.json_response(content, status=status)

    app = web.Application(client_max_size=max_bytes)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await start_site(runner, host, port)
        yield runner.addresses[0][:2]
    finally:
        await runner.cleanup()
