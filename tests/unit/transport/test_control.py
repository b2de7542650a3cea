"""The control socket: real sockets between two threads."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from streamrl.errors import ControlError
from streamrl.transport.control import FOLDER_PREFIX, ControlServer, ask, is_running, note

pytestmark = pytest.mark.timeout(60)


BROKEN = (TypeError, OverflowError, KeyError, OSError, AssertionError, ZeroDivisionError)


def answer(request):
    if request["verb"] == "refuse":
        raise ControlError("not now: try later")
    if request["verb"] == "break":
        raise {one.__name__: one for one in BROKEN}[request["how"]]("within")
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


def test_an_error_in_an_answer_is_told_and_ends_nothing(server):
    for one in BROKEN:
        with pytest.raises(ControlError, match=f"cannot be answered: {one.__name__}"):
            ask(note(server.endpoint), "the hub", verb="break", how=one.__name__)
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


KILLED = """
import sys, zmq
from streamrl.transport.control import ControlServer

print(ControlServer(zmq.Context(), dict).endpoint, flush=True)
sys.stdin.read()
"""


def test_the_next_start_sweeps_the_folders_of_dead_processes_and_no_others(server):
    """Whatever run they were of: after kill -9 of a launcher its directory may never be named again."""
    children = [subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                for _ in range(2)]
    dead, living = (Path(child.stdout.readline().decode().strip().removeprefix("ipc://")).parent for child in children)
    children[0].kill()
    children[0].wait(30)
    foreign = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # no note: of an older release, or just begun

    context = zmq.Context()
    ControlServer(context, answer).close()
    context.term()

    assert not dead.exists() and living.exists() and folder(server).exists() and foreign.exists()
    foreign.rmdir()
    children[1].communicate(timeout=30)


@pytest.mark.parametrize("pid", [[1], {"a": 1}, 1e400, "x", None, True, -1, "../self"])
def test_a_note_that_somebody_has_edited_names_no_process_that_runs(pid):
    assert is_running(note("")) and is_running({**note(""), "began": "", "pid": pid}) == (pid is True)
