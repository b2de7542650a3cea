"""The thread around a session: what it logs when no hub answers."""

import asyncio
import logging
import socket
import threading

import pytest
import zmq

from streamrl.messages import TO_HUB, ActorState, Hello, Stop, StopReason
from streamrl.messages.codec import Decoder, encode
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


@pytest.mark.timeout(60)
def test_close_ends_the_thread_with_and_without_a_hub():
    """A socket left open would keep the thread waiting for the end of its context."""
    hub = zmq.Context.instance().socket(zmq.ROUTER)
    hub.linger = 0

    async def play(port: int) -> bool:
        client = HubClient(f"tcp://127.0.0.1:{port}", make_link())
        client.start()
        if port != 1:
            assert await asyncio.to_thread(hub.poll, 20_000), "no HELLO came"
        client.close()
        return client._thread.is_alive()

    try:
        assert not asyncio.run(play(hub.bind_to_random_port("tcp://127.0.0.1")))
        assert not asyncio.run(play(1))
    finally:
        hub.close()


class FakeNetwork:
    """Forwards connections to a port, until `breaks`: those that are open then carry nothing more, and stay open."""

    def __init__(self, port: int) -> None:
        self._port, self._broken = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.num_connections = self._listener.getsockname()[1], 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def breaks(self) -> None:
        self._broken = self.num_connections

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(("127.0.0.1", self._port))
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target, self.num_connections), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        try:
            while data := source.recv(65536):
                if number > self._broken:
                    target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        for one in (self._listener, *self._open):
            one.close()


@pytest.mark.timeout(60)
def test_a_connection_that_broke_silently_is_replaced(monkeypatch):
    """The hub hears HELLO again although the old connection looks open on both sides."""
    monkeypatch.setattr(module, "NO_ANSWER_S", 1.0)
    hub = zmq.Context.instance().socket(zmq.ROUTER)
    hub.linger = 0
    network = FakeNetwork(hub.bind_to_random_port("tcp://127.0.0.1"))
    decoder = Decoder(TO_HUB)

    def hello() -> bytes:
        while True:
            assert hub.poll(20_000), "no HELLO came"
            route, frame = hub.recv_multipart()
            if isinstance(decoder.decode(frame), Hello):
                return route

    async def play() -> None:
        link = make_link()
        client = HubClient(f"tcp://127.0.0.1:{network.port}", link)
        client.start()
        try:
            route = await asyncio.to_thread(hello)
            network.breaks()
            hub.send_multipart([route, encode(Stop(StopReason.BUSY, True, 0.1, 1, "lost on the way"))])
            assert await asyncio.to_thread(hello) != route, "it came over a new connection"
            assert link.state is ActorState.CONNECTING and network.num_connections >= 2
        finally:
            client.close()

    try:
        asyncio.run(play())
    finally:
        network.close()
        hub.close()
