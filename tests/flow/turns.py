"""Engines that kill processes of their run in given states of its turns, each once."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.engines.base import GenerateRequest, Generation, InstallTimes
from actors.engines.native.engine import NativeEngine
from streamrl.messages import VersionRef
from tests.fakes.fake_vllm_sleep import FakeSleepVllm

FOLDER, KILLS = "STREAMRL_TEST_TURNS", "STREAMRL_TEST_KILLS"
"""Environment variables: the folder of the run and its kills; and these, `state:victim` one after the other."""
SOON_S = 0.1
"""From the report of a release to somewhere in the learner's turn."""


class Kills:
    """States: generating, releasing, released, waking, and in a moment after a release the learner's turn."""

    _version = -1
    _asleep = False

    async def generate(self, request: GenerateRequest) -> Generation:
        work = asyncio.ensure_future(super().generate(request))
        await asyncio.sleep(0)
        kill_in("generating", self._version)
        return await work

    async def release(self) -> None:
        kill_in("releasing", self._version)
        await super().release()
        self._asleep = True
        kill_in("released", self._version)
        threading.Timer(SOON_S, kill_in, ("learner", self._version)).start()

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        if self._asleep:
            kill_in("waking", self._version)
        times = await super().install(tensors, ref)
        self._asleep, self._version = False, ref.version
        return times


class KillingEngine(Kills, NativeEngine):
    """The native engine that kills."""


class KillingVllm(Kills, FakeSleepVllm):
    """vLLM that kills, with a stand-in for its allocator."""


def kill_in(state: str, version: int) -> None:
    """Kill the victim that is next, if it is to be killed in this state and another version than the one before."""
    folder = Path(os.environ[FOLDER])
    kills = os.environ[KILLS].split(",")
    done = [json.loads(path.read_text()) for path in sorted(folder.glob("kill-*"))]
    if len(done) == len(kills) or version < 1 or (done and done[-1] >= version):
        return
    wanted, _, victim = kills[len(done)].partition(":")
    if wanted == state:
        with suppress(FileExistsError):
            with (folder / f"kill-{len(done):02}").open("x") as note:
                json.dump(version, note)
            os.kill(pid_of(victim, folder), signal.SIGKILL)


def pid_of(victim: str, folder: Path) -> int:
    if victim == "actor":
        return os.getpid()
    hub = int(json.loads((folder / "run" / "hub.json").read_text())["pid"])
    if victim == "hub":
        return hub
    return int(Path(f"/proc/{hub}/stat").read_text().rpartition(")")[2].split()[1])
