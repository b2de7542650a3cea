"""Connections that do not say who they are: ended before they take what the process needs."""

from __future__ import annotations

import logging
import resource
import socket
import subprocess
import sys
import time

import pytest
import zmq

from streamrl.messages import Announce, Bye, Stop
from streamrl.transport.peers import PeerLimit, raise_descriptor_limit
from streamrl.transport.sockets import actor_dealer, bind, bound_endpoint, hub_router
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 60.0


class Listener:
    """A ROUTER in this thread, and its limit."""

    def __init__(self, **limits) -> None:
        self.context = zmq.Context()
        self.router = hub_router(self.context, max_message_bytes=1 << 20, receive_hwm=100)
        self.peers = PeerLimit(self.router, **limits)
        bind(self.router, "tcp://127.0.0.1:0", "test")
        self.endpoint = bound_endpoint(self.router)
        self.named: dict[bytes, object] = {}

    def turn(self, now: float = 0.0) -> None:
        """Hear what has come; a message of one byte is a name."""
        while self.router.poll(10):
            first, frame = self.router.recv_multipart(copy=False)
            is_name = len(frame.bytes) == 1
            if is_name:
                self.named[first.bytes] = frame.bytes
            self.peers.heard(frame, now, first.bytes if is_name else None)
        self.peers.tick(now, self.named)

    def connect(self) -> socket.socket:
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.peers.close()
        self.context.destroy(linger=0)


def until(condition, turn) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        turn()


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it; what it said before is read away."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_of_too_many_connections_without_a_name_the_oldest_are_ended_and_those_with_one_stay():
    with Listener(room=16) as listener:
        honest = actor_dealer(listener.context, listener.endpoint)
        honest.send(b"a")
        until(lambda: listener.named, listener.turn)
        idle = [listener.connect() for _ in range(30)]

        until(lambda: listener.peers.num_closed >= 22, listener.turn)

        until(lambda: sum(map(has_ended, idle)) == 22, listener.turn)
        assert [has_ended(one) for one in idle] == [True] * 22 + [False] * 8
        listener.router.send_multipart([next(iter(listener.named)), b"still here"])
        assert honest.poll(20_000) and honest.recv() == b"still here"
        for one in idle:
            one.close()


def test_a_silent_connection_is_ended_after_a_while_and_one_that_lost_its_name_is_a_new_one():
    with Listener(room=16, silent_s=30.0) as listener:
        named, nameless = (actor_dealer(listener.context, listener.endpoint) for _ in range(2))
        named.send(b"a")
        nameless.send(b"hello")
        until(lambda: len(listener.peers._peers) == 2 and listener.named, listener.turn)

        listener.turn(now=29.0)
        assert listener.peers.num_closed == 0
        listener.turn(now=31.0)
        assert listener.peers.num_closed == 1, "it was heard at 0"
        listener.turn(now=500.0)
        assert listener.named and len([one for one in listener.peers._peers.values() if one.name]) == 1
        listener.named.clear()  # it was evicted
        listener.turn(now=501.0)
        listener.turn(now=530.0)
        num = listener.peers.num_closed
        listener.turn(now=532.0)
        assert listener.peers.num_closed > num


def test_the_limit_on_descriptors_is_lifted_as_far_as_it_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CROWD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
host, port, num = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
idle = [socket.create_connection((host, port)) for _ in range(num)]
print("there", flush=True)
sys.stdin.read()
"""


def test_a_crowd_of_idle_connections_leaves_the_hub_enough_descriptors_to_publish(tmp_path, python_env):
    model = tiny_model(tmp_path / "model")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
    try:
        with LiveHub(tmp_path, config_of()) as hub:
            hub.publish(0, model)
            actor = hub.connect()
            actor.join()
            host, _, port = hub.server.endpoint.removeprefix("tcp://").rpartition(":")
            crowd = subprocess.Popen(
                [sys.executable, "-c", CROWD, host, port, "1300"], env=python_env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
            assert crowd.stdout.readline() == "there\n"
            until(lambda: hub.server.context.counters["num_connections_ended"] >= 800, hub.link.refresh_status)
            hub.publish(1, model)

            assert actor.receive(Announce).manifest.ref.version == 1
            late = hub.connect()
            late.join("a2")
            crowd.stdin.close()
            crowd.wait(timeout=PATIENCE_S)
            crowd.stdout.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_frames_that_are_not_ours_do_not_flood_the_log_and_cost_the_connection(tmp_path, caplog):
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), LiveHub(tmp_path, config_of()) as hub:
        counters = hub.server.context.counters
        for _ in range(3):
            before = counters["num_connections_ended"]
            flood = actor_dealer(hub.context, hub.server.endpoint)
            for _ in range(700):
                flood.send(b"GET / HTTP/1.1\r\n\x1b[31m")
            # Each is ended before the next connects: a descriptor that is used again would be that one's.
            until(lambda before=before: counters["num_connections_ended"] > before, hub.link.refresh_status)
            flood.close(linger=0)
        peer = hub.connect()
        peer.send(Bye(1, "of ours, from an unknown actor"))
        peer.receive(Stop)
        assert counters["num_wire_errors_frame"] > 3

    refused = [one for one in caplog.messages if "refused a message" in one]
    assert 0 < len(refused) <= 11 + time.monotonic() - began
    assert not any(char == "\x1b" for char in caplog.text)


def test_a_name_that_could_not_be_shown_is_refused(tmp_path, caplog):
    with LiveHub(tmp_path, config_of()) as hub:
        for name in ("a\x1b[2Jb", "a b", "", "a\nb", "é"):
            peer = hub.connect()
            peer.hello(name)
            stop = peer.receive(Stop)
            assert (stop.exit_code, stop.rejoin) == (4, False) and "set actors.actor_id" in stop.detail, name
            assert stop.detail.isprintable() and "\x1b" not in caplog.text, name
        hub.connect().hello("x" * 64 + "y")  # no such message exists
        until(lambda: hub.server.context.counters["num_wire_errors_body"], hub.link.refresh_status)
