"""`env.name=verifiers:ID`: a taskset of verifiers 0.4, whose own harness plays the episodes and whose rewards count.

The package stays in an environment of its own: `verifiers_worker` runs in it, one process for all episodes of an actor,
and its agents call the model through a session of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from envs.agents.task import AgentEnv
from streamrl.config.addresses import environment_without_keys
from streamrl.environment import AgentSession, Record, SingleTurnTask, Step
from streamrl.errors import TaskError
from streamrl.processes import Child

PREFIX = "verifiers:"
WORKER = str(Path(__file__).with_name("verifiers_worker.py"))
MAX_TEST = 200
MAX_LINE = 1 << 20
MAX_UNREAD = 1024
"""Lines that wait for a process to read them; one that lets more wait reads no more."""
END_S = 1.0
ENDED = "its process ended, see the last lines of this actor's log"
log = logging.getLogger("streamrl.actor")


class VerifiersTask(SingleTurnTask):
    """Task of one taskset: its records, and episodes that its process plays.

    Args:
        taskset_id: as of `vf-eval`.
        python: of an environment with verifiers and the taskset; None is this one.
        num_test: the last tasks, which are held out; None is a tenth of them, at most 200.
        settings: of verifiers' environment, as its `--env.*`: taskset, agent, timeout.
    """

    def __init__(
        self, taskset_id: str, /, *, python: str | None = None, num_test: int | None = None, **settings: Any
    ) -> None:
        self.name = PREFIX + taskset_id
        settings = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset_id}}
        # -P: the folder of the program holds modules of other names, this one too.
        self._command, self._num_test = [python or sys.executable, "-P", WORKER, json.dumps(settings)], num_test
        self._unset = "" if python else ", which is not set and so streamrl's own,"
        self._processes = _Processes([*self._command, "play"])
        self.tear_down = self._processes.close

    def set_up(self) -> None:
        """The process starts with the first episode."""

    @cached_property
    def _splits(self) -> dict[str, list[Record]]:
        # Into files: what it leaves running may hold a pipe open.
        with (tempfile.TemporaryFile("w+", errors="replace") as out,
              tempfile.TemporaryFile("w+", errors="replace") as err):
            try:
                status = subprocess.run([*self._command, "tasks"], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                        env=environment_without_keys()).returncode
            except OSError as error:
                raise TaskError(f"env.options.python cannot be started, check the path: {error}") from error
            out.seek(0)
            err.seek(0)
            said, records = err.read().strip(), [found for line in out if "task" in (found := _json_object(line))]
        if status:
            raise TaskError(
                f"task {self.name}: see that env.options.python{self._unset} is that of an environment with verifiers "
                "0.4 and the taskset (docs/interfaces.md makes one), and env.options.* settings of its environment: "
                f"{said.rpartition(chr(10))[2][:300]}"
            )
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
        return AgentEnv(super().env(), self._processes.play, self.name)


class _Processes:
    """One process that plays any number of episodes at once; one that ended has a successor with the next episode."""

    def __init__(self, command: list[str]) -> None:
        self._command, self._numbers = command, itertools.count()
        self._process: _Process | None = None

    async def play(self, record: Record, session: AgentSession) -> Any:
        """The reward of an episode, with its parts."""
        number = next(self._numbers)
        if self._process is None or self._process.ended:
            self._process = _Process(self._command)
        process = self._process
        answer = process.ask(
            number, {"task": record["task"], "base_url": session.base_url, "api_key": session.api_key}
        )
        try:
            found = await answer
        finally:
            process.cancel(number)
        if "error" in found:
            raise TaskError(f"the taskset failed, see there: {found['error']}")
        return found["reward"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()


class _Process:
    """Threads write to it and read from it, so that one that does neither blocks no episode.

    A line that is no answer belongs to the log, as what a library prints while it is imported.
    """

    def __init__(self, command: list[str]) -> None:
        try:
            self._child = Child(command, environment=environment_without_keys(), parent_watch=False, answers=True)
        except OSError as error:
            raise TaskError(f"env.options.python cannot be started, check the path: {error}") from error
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._to_say: queue.Queue[str] = queue.Queue(MAX_UNREAD)
        self._lock, self.ended = threading.Lock(), False
        for work in (self._write, self._wait):
            threading.Thread(target=work, daemon=True).start()

    def ask(self, number: int, episode: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """The answer, which also comes if the process ends, or has ended."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self.ended:
                self._asked[number] = answer
                self._say({"id": number, **episode})
                return answer
        answer.set_result({"error": ENDED})
        return answer

    def cancel(self, number: int) -> None:
        """Stop waiting for its answer."""
        with self._lock:
            if self._asked.pop(number, None) is not None:
                self._say({"cancel": number})

    def kill(self) -> None:
        """End it and its group, now."""
        with self._lock:
            if not self.ended:
                self._child.kill_group()

    def _say(self, line: dict[str, Any]) -> None:
        try:
            self._to_say.put_nowait(json.dumps(line) + "\n")
        except queue.Full:
            log.warning("a taskset's process reads no more, %d lines wait for it: it is ended", MAX_UNREAD)
            self._child.kill_group()

    def _write(self) -> None:
        pipe = self._child.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # it has closed its input
            while line := self._to_say.get():
                pipe.write(line.encode())
                pipe.flush()
        self.kill()

    def _read(self) -> None:
        pipe = self._child.process.stdout
        assert pipe is not None
        try:
            while line := pipe.readline(MAX_LINE).decode(errors="replace"):
                found = _json_object(line)
                if isinstance(found.get("id"), int) and {"reward", "error"} & set(found):
                    with self._lock:
                        answer = self._asked.pop(found["id"], None)
                    _resolve(answer, found)
                else:
                    sys.stderr.write(line)
        finally:
            self.kill()

    def _wait(self) -> None:
        """Wait for its end, and let no episode wait for it after that."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)  # its number stays its own
        self.kill()  # what it leaves
        reader.join(END_S)  # the answers that it gave last
        with self._lock:
            self.ended = True
            asked, self._asked = self._asked, {}
        self._child.process.wait()
        for answer in asked.values():
            _resolve(answer, {"error": ENDED})
        with contextlib.suppress(queue.Full):
            self._to_say.put_nowait("")  # ends the writer


def _resolve(answer: asyncio.Future[dict[str, Any]] | None, found: dict[str, Any]) -> None:
    if answer is not None:
        with contextlib.suppress(RuntimeError):  # its loop is closed
            answer.get_loop().call_soon_threadsafe(lambda: answer.done() or answer.set_result(found))


def _json_object(line: str) -> dict[str, Any]:
    """The JSON object in a line; empty if the line holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
