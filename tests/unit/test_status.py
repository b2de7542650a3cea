"""`streamrl status` while a part of the run is silent: real control sockets of this process."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import zmq

from streamrl.run_dirs import LAUNCH_NOTE
from streamrl.transport.control import ControlServer, note
from streamrl.verbs.status import status


@pytest.fixture
def servers(tmp_path: Path):
    """Hub and launcher of a run; neither answers before its `serve` is called."""
    context = zmq.Context()
    answers = {
        "hub.json": {}, LAUNCH_NOTE: {"processes": [["actor-0", "runs"]], "learner": "runs for 7 s", "will_keep": 0},
    }
    made = {name: ControlServer(context, lambda request, told=told: told) for name, told in answers.items()}
    for name, server in made.items():
        (tmp_path / name).write_text(json.dumps(note(server.endpoint)))
    yield made
    for server in made.values():
        server.close()
    context.term()


@pytest.mark.timeout(60)
def test_a_hub_that_does_not_answer_is_told_with_what_the_launcher_knows(tmp_path: Path, servers, capsys):
    launcher, done = servers[LAUNCH_NOTE], threading.Event()

    def serve() -> None:
        while not done.is_set():
            if launcher.socket.poll(50):
                launcher.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert status([str(tmp_path)]) == 0
    finally:
        done.set()
        thread.join()

    told = capsys.readouterr().out
    assert "its hub is silent" in told and "hub       does not answer: the hub" in told, told
    assert "learner   runs for 7 s" in told and "actor-0   runs" in told and "keeps 1 actor alive" in told, told
