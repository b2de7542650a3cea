"""The control socket: real sockets between two threads."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from streamrl.errors import ControlError
from streamrl.transport.control import ControlServer, ask, is_running, note, remove_stale

pytestmark = pytest.mark.timeout(60)


def answer(request):
    if request["verb"] == "refuse":
        raise ControlError("not now: try later")
    return {"heard": request}


@pytest.fixture
def server() -> Iterator[ControlServer]:
    context, done = zmq.Context(), threading.Event()
    server = ControlServer(context, answer)

    def serve() -> None:
        while not done.is_set():
            server.socket.poll(20)
            server.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    yield server
    done.set()
    thread.join()
    server.close()
    context.term()


def folder(server: ControlServer) -> Path:
    return Path(server.endpoint.removeprefix("ipc://")).parent


def test_a_request_gets_its_answer_and_a_refusal_its_reason(server):
    noted = note(server.endpoint)

    assert ask(noted, "the hub", verb="status", depth=3) == {"heard": {"verb": "status", "depth": 3}}
    with pytest.raises(ControlError, match="not now: try later"):
        ask(noted, "the hub", verb="refuse")


def test_only_its_owner_may_enter_the_folder_of_the_socket(server):
    assert stat.S_IMODE(os.stat(folder(server)).st_mode) == 0o700


@pytest.mark.parametrize("request_bytes", [b"", b"{", b"[1]", b'{"verb": 3}', b"[" * 100_000, b"\xff\xfe"])
def test_what_cannot_be_read_is_refused_and_the_server_goes_on(server, request_bytes):
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(server.endpoint)
    client.send_multipart([b"", request_bytes])
    if len(request_bytes) < 1 << 16:  # larger ones are cut off with their connection
        assert client.poll(20_000) and b'"ok": false' in client.recv_multipart()[-1]
    context.destroy(linger=0)

    assert ask(note(server.endpoint), "the hub", verb="status")["heard"] == {"verb": "status"}


def test_a_process_that_does_not_answer_is_named():
    context = zmq.Context()
    deaf = ControlServer(context, answer)
    try:
        with pytest.raises(ControlError, match=rf"the hub \(process {os.getpid()}\) did not answer within 0.2 s"):
            ask(note(deaf.endpoint), "the hub", timeout_s=0.2, verb="status")
    finally:
        deaf.close()
        context.term()


def test_a_process_that_is_gone_elsewhere_or_older_is_an_error_that_says_so(server):
    with pytest.raises(ControlError, match="runs on far: give this command there"):
        ask({**note(server.endpoint), "host": "far"}, "the hub", verb="status")
    with pytest.raises(ControlError, match="of an older release"):
        ask({"pid": 1}, "the hub", verb="status")
    with pytest.raises(ControlError, match="the process has ended"):
        ask({**note("ipc:///nowhere/control"), "pid": 2**22 + 1}, "the hub", verb="status")


def test_the_folder_of_a_killed_predecessor_goes_and_that_of_a_living_one_stays(server):
    remove_stale(note(server.endpoint))
    assert folder(server).exists() and is_running(note(server.endpoint))

    remove_stale({**note(server.endpoint), "pid": 2**22 + 1})
    assert not folder(server).exists()
    remove_stale({})
