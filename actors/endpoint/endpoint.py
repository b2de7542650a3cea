"""The endpoint of an actor: it listens from the first session on, and every session has a key of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from actors.endpoint.sessions import Session, Sessions
from actors.trajectory.client import Client
from streamrl.config.addresses import advertised, in_url, reach_directly
from streamrl.errors import EngineError

log = logging.getLogger("streamrl.actor")


class Endpoint:
    """Serves the clients of episodes over HTTP.

    Args:
        bind: HOST:PORT; port 0 takes a free one.
        advertise: host name, address or network interface in the base URLs of sessions, or a whole URL up to the
            path; None is the host.
        admin_key: see `Sessions`.
    """

    def __init__(self, bind: str = "127.0.0.1:0", advertise: str | None = None, admin_key: str | None = None) -> None:
        self._host, _, port = bind.rpartition(":")
        self._port = int(port)
        self._advertise = advertised(advertise or self._host, "actors.endpoint.advertise")
        self._sessions, self._has_admin = Sessions(admin_key), admin_key is not None
        self._starting = asyncio.Lock()
        self._runner: Any = None

    @asynccontextmanager
    async def session(self, client: Client) -> AsyncIterator[Session]:
        """Open a session around an agent's episode. Raises EngineError: the address is taken, no lease can help."""
        session = self._sessions.begin(client, await self.base_url())
        try:
            yield session
        finally:
            self._sessions.end(session)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def base_url(self) -> str:
        """The address at which it listens, from now on."""
        async with self._starting:
            if self._runner is None:
                from actors.endpoint.server import serve  # its library takes a while to load, and few runs need it

                try:
                    self._runner, self._port = await serve(
                        self._sessions, self._host.strip("[]"), self._port, control=True
                    )
                except OSError as error:
                    raise EngineError(
                        f"actors.endpoint.bind={self._host}:{self._port} cannot be had: {error}. Take port 0, or "
                        "another one for each actor of this machine."
                    ) from error
                reach_directly(self._root)
                if self._has_admin:
                    log.info("programs open episodes by POST %s/sessions", self._root)
        return f"{self._root}/v1"

    @property
    def _root(self) -> str:
        if "://" in self._advertise:
            return self._advertise.rstrip("/")
        return f"http://{in_url(self._advertise)}:{self._port}"
