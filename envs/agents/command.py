"""An agent that is a program: started for each episode, with the address of its session in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from streamrl.environment import AgentSession, Record
from streamrl.errors import TaskError

TAIL_BYTES = 16 << 10
"""Of what the program wrote: its last line must be shorter."""


def command_agent(command: str) -> Callable[[Record, AgentSession], Awaitable[Any]]:
    """The agent that a command line starts. Raises TaskError for a line that is none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise TaskError(f"env.agent_command={command}: {error}, quote its words as in a shell") from error
    if not words:
        raise TaskError("env.agent_command is empty: give a program and its arguments, as 'python agent.py'")

    async def play(record: Record, session: AgentSession) -> Any:
        with tempfile.TemporaryDirectory(prefix="streamrl-agent-") as folder:
            return _reward(await _run(words, record, session, Path(folder)))

    return play


async def _run(words: list[str], record: Record, session: AgentSession, folder: Path) -> str:
    """The last line that the program wrote. Raises TaskError if it cannot be started or fails."""
    (folder / "record.json").write_text(json.dumps(record))
    variables = {
        "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": session.api_key,
        "STREAMRL_RECORD": str(folder / "record.json"),
    }
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, env=os.environ | variables,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as error:
            raise TaskError(f"env.agent_command cannot be started: {error}. See that its program is there.") from error
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise TaskError(f"env.agent_command ended with status {code}, see its last line: {_last_line(folder / 'err')}")
    return _last_line(folder / "out")


def _reward(line: str) -> Any:
    """The number or the dict of parts on a line; None if it is neither."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) else None


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
