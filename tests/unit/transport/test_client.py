"""The thread around a session: what it logs when no hub answers."""

from __future__ import annotations

import asyncio
import logging
import socket

from streamrl.transport import client as module
from streamrl.transport.client import HubClient
from tests.unit.transport.test_session import make_link


def test_an_actor_without_an_answer_says_so_again_and_again(monkeypatch, caplog):
    monkeypatch.setattr(module, "NO_ANSWER_S", 0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: a wrong address
        endpoint = f"tcp://127.0.0.1:{unused.getsockname()[1]}"

        async def wait() -> None:
            client = HubClient(endpoint, make_link())
            client.start()
            await asyncio.sleep(0.7)
            client.close()

        with caplog.at_level(logging.WARNING, logger="streamrl.actor"):
            asyncio.run(wait())

    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 2
    assert said[0].startswith(f"no answer from {endpoint} for ") and "is the address right" in said[0]
