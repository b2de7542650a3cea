"""An actor that is told to end while it still loads: it ends at once, unless its engine may have started processes."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest

from actors.runtime import RuntimeHandle, has_processes
from actors.weights.updater import VersionPin
from streamrl.config.load import load_config, to_plain
from streamrl.parent_watch import program
from tests.flow.processes import wait_until
from tests.unit.actors.fakes import lease


def close_while_it_is_built(gate: threading.Event, *, processes: bool) -> bool:
    async def work() -> bool:
        handle = RuntimeHandle(lambda welcome: gate.wait(), lambda welcome: processes)  # type: ignore[arg-type]
        assert handle.begin(None)  # type: ignore[arg-type]
        closing = asyncio.ensure_future(handle.close())
        await asyncio.wait({closing}, timeout=0.5 if processes else None)
        ended = closing.done()
        closing.cancel()
        return ended

    return asyncio.new_event_loop().run_until_complete(work())


@pytest.mark.parametrize("processes", [False, True])
def test_only_an_engine_that_may_have_started_processes_is_waited_for(processes: bool):
    gate = threading.Event()
    try:
        assert close_while_it_is_built(gate, processes=processes) is not processes
    finally:
        gate.set()


@pytest.mark.parametrize(
    ("words", "found"),
    [(["actors.engine=native"], False), (["actors.engine=vllm"], True)],
)
def test_which_engines_may_have_started_processes_is_read_from_the_settings(words: list[str], found: bool):
    config = load_config(["experiment=quickstart"])
    welcome = SimpleNamespace(task=json.dumps(to_plain(config)))

    assert has_processes(welcome, words) is found  # type: ignore[arg-type]


def test_an_actor_in_its_imports_ends_at_sigterm(tmp_path, python_env):
    """Also with a parent that ignores the signal, which children inherit."""
    (tmp_path / "torch.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n")
    python_env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), python_env["PYTHONPATH"]])
    command = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh", *program("actors"), "connect=tcp://127.0.0.1:1"]
    with subprocess.Popen(command, cwd=tmp_path, env=python_env) as actor:
        wait_until((tmp_path / "importing").exists, 50, "the import")
        actor.terminate()
        assert actor.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize("num_open", [0, 2])
def test_only_a_version_that_answers_wait_for_is_said_to_wait(num_open: int, caplog: pytest.LogCaptureFixture):
    async def work() -> None:
        hold = VersionPin()
        leases = [lease(number, keep_s=60.0, num_after=1) for number in range(num_open or 1)]
        for one in leases:
            hold.begin(one)
        if not num_open:
            hold.end(leases[0].ref)  # more may come in a moment
        waiting = asyncio.ensure_future(hold.released())
        await asyncio.sleep(0)
        waiting.cancel()

    with caplog.at_level(logging.INFO, "streamrl.actor"):
        asyncio.new_event_loop().run_until_complete(work())

    assert [record.getMessage() for record in caplog.records] == (
        [f"the next version waits for {num_open} answers of an evaluation"] if num_open else []
    )
