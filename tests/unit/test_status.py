"""`streamrl status` while a part of the run is silent: real control sockets of this process."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from operator import attrgetter
from pathlib import Path

import pytest
import zmq

from streamrl.config.catalog import open_mappings
from streamrl.config.load import load_partial
from streamrl.errors import ControlError
from streamrl.run_dirs import LAUNCH_NOTE, note_start
from streamrl.transport.control import ControlServer, note
from streamrl.verbs.resume import command_of
from streamrl.verbs.runs import QUIET_S, find_run
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


def run_of(path: Path, noted: dict, *, state: str = "running", quiet_s: float = 0.0, launched: bool = False) -> Path:
    """A run with these notes, of which nothing was written for so long."""
    (path / "EPOCH").write_text("1")
    note_start(path, ["streamrl", "launch", "experiment=quickstart"])
    status = {"state": state, "version": 7, "total_steps": 7}
    files = {"hub.json": noted, "status.json": status} | ({LAUNCH_NOTE: noted} if launched else {})
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
        os.utime(path / name, (time.time() - quiet_s,) * 2)
    return path


OVER = {
    "its process id is another process's by now": {"noted": {**note("ipc:///none"), "began": "an earlier one"}},
    "finished on another machine": {"noted": {**note(""), "host": "node7"}, "state": "finished"},
    "stopped on another machine": {"noted": {**note(""), "host": "node7"}, "state": "stopped"},
    "killed with its machine": {"noted": {**note(""), "host": "node7"}, "quiet_s": 2 * QUIET_S, "launched": True},
}


@pytest.mark.parametrize("case", OVER)
def test_a_run_that_is_over_can_be_resumed_wherever_it_ran(tmp_path, case, capsys):
    run = run_of(tmp_path, **OVER[case])

    assert status([str(run)]) == 0
    assert " is over: " in capsys.readouterr().out
    assert "trainer.num_steps=9" in command_of(find_run(str(run)), ["trainer.num_steps=9"])


def test_a_resumed_run_takes_away_whatever_its_last_start_gave(tmp_path):
    for prefix in open_mappings():
        for before in ([f"{prefix}x=1"], [f"+{prefix}x=1", f"~{prefix}x", f"{prefix}x=2"], [f"{prefix[:-1]}={{x: 1}}"]):
            run = run_of(tmp_path, {**note(""), "host": "node7"}, state="stopped")
            note_start(run, ["streamrl", "launch", "staleness.eta=3", *before])
            _, *words = command_of(find_run(str(run)), [f"~{prefix}x", "staleness.eta=1"])
            config = load_partial(words)
            assert "x" not in attrgetter(prefix[:-1])(config) and config.staleness.eta == 1, words


@pytest.mark.parametrize("lock", [None, "LOCK", "LAUNCH_LOCK"])
def test_a_run_that_goes_on_on_another_machine_is_not_started_twice(tmp_path, lock):
    quiet_s = 0.0 if lock is None else 2 * QUIET_S
    run = run_of(tmp_path, {**note(""), "host": "node7"}, quiet_s=quiet_s, launched=True)
    with open(run / (lock or "none"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ControlError, match="is running"):
            command_of(find_run(str(run)), [])
