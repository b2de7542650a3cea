"""`env.name=verifiers:ID`: a taskset of verifiers 0.4, whose own harness plays the episodes and whose rewards count.

The package stays in an environment of its own: `verifiers_worker` runs in it, one process for all episodes of an actor,
and its agents call the model through a session of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from envs.agents.task import AgentEnv
from streamrl.environment import AgentSession, Record, SingleTurnTask, Step
from streamrl.errors import TaskError

PREFIX = "verifiers:"
WORKER = str(Path(__file__).with_name("verifiers_worker.py"))
MAX_TEST = 200


class VerifiersTask(SingleTurnTask):
    """Task of one taskset: its records, and episodes that its process plays.

    Args:
        taskset_id: as of `vf-eval`.
        python: of an environment with verifiers and the taskset.
        num_test: the last tasks, which are held out; None is a tenth of them, at most 200.
        settings: of verifiers' environment, as its `--env.*`: taskset, agent, timeout.
    """

    def __init__(
        self, taskset_id: str, /, *, python: str = sys.executable, num_test: int | None = None, **settings: Any
    ) -> None:
        self.name = PREFIX + taskset_id
        settings = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset_id}}
        # -P: the folder of the program holds modules of other names, this one too.
        self._command, self._num_test = [python, "-P", WORKER, json.dumps(settings)], num_test
        self._process = _Process([*self._command, "play"])
        self.tear_down = self._process.close

    def set_up(self) -> None:
        """The process starts with the first episode."""

    @cached_property
    def _splits(self) -> dict[str, list[Record]]:
        try:
            done = subprocess.run([*self._command, "tasks"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise TaskError(f"env.options.python cannot be started, see that it is there: {error}") from error
        if done.returncode:
            raise TaskError(
                f"task {self.name}: see that env.options.python is that of an environment with verifiers 0.4 and the "
                f"taskset, and env.options.* settings of its environment: {done.stderr.strip()[-300:]}"
            )
        records = [json.loads(line) for line in done.stdout.splitlines()]
        held_out = min(MAX_TEST, -(-len(records) // 10)) if self._num_test is None else self._num_test
        if not 0 < held_out < len(records):
            raise TaskError(f"task {self.name} has {len(records)} tasks: env.options.num_test must leave some to train")
        return {"train": records[:-held_out], "test": records[-held_out:]}

    def num_records(self, split: str) -> int:
        return len(self._splits["train" if split == "train" else "test"])

    def record(self, split: str, index: int) -> Record:
        return self._splits["train" if split == "train" else "test"][index]

    def reward(self, record: Record, completion: str) -> float | Step:
        raise TaskError(f"task {self.name} gave no reward: write a @vf.reward")

    def env(self) -> AgentEnv:
        return AgentEnv(super().env(), self._process.play, self.name)


class _Process:
    """A process that plays any number of episodes at once; one that ended has a successor with the next episode."""

    def __init__(self, command: list[str]) -> None:
        self._command, self._numbers = command, itertools.count()
        self._process: subprocess.Popen[str] | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] | None = None  # of the process; None: there is none

    async def play(self, record: Record, session: AgentSession) -> Any:
        """The reward of an episode, with its parts."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        asked = self._start(loop) if self._asked is None else self._asked
        answer = asked[number] = loop.create_future()
        self._say({"id": number, "task": record["task"], "base_url": session.base_url, "api_key": session.api_key})
        try:
            found = await answer
        finally:
            if asked.pop(number, None) is not None:
                self._say({"cancel": number})
        if "error" in found:
            raise TaskError(f"the taskset failed, see there: {found['error']}")
        return found["reward"]

    def _start(self, loop: asyncio.AbstractEventLoop) -> dict[int, asyncio.Future[dict[str, Any]]]:
        try:
            self._process = process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise TaskError(f"env.options.python cannot be started, see that it is there: {error}") from error
        self._asked = asked = {}

        def read() -> None:
            assert process.stdout is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                for line in process.stdout:
                    loop.call_soon_threadsafe(_answer, asked, json.loads(line))
                loop.call_soon_threadsafe(self._ended, asked)
            process.wait()

        threading.Thread(target=read, daemon=True).start()
        return asked

    def _ended(self, asked: dict[int, asyncio.Future[dict[str, Any]]]) -> None:
        self._asked = None
        for number in [*asked]:
            _answer(asked, {"id": number, "error": "its process ended, see the last lines of this actor's log"})

    def _say(self, line: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_ended` follows
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _answer(asked: dict[int, asyncio.Future[dict[str, Any]]], found: dict[str, Any]) -> None:
    answer = asked.pop(found["id"], None)
    if answer is not None and not answer.done():
        answer.set_result(found)
