"""An agent that is a program: started for each episode, with the address of its session in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from envs.sandbox.isolation import watched
from streamrl.config.addresses import environment_without_keys
from streamrl.environment import AgentSession, Record
from streamrl.errors import TaskError

TAIL_BYTES = 16 << 10
"""Of what the program wrote: its last line must be shorter."""
END_S = 10.0
"""For everything that the program started to be gone."""


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
    if shutil.which(words[0]) is None:
        raise TaskError(f"env.agent_command cannot be started: there is no program {words[0]}. See that it is there.")
    (folder / "record.json").write_text(json.dumps(record))
    variables = {
        "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": session.api_key,
        "STREAMRL_RECORD": str(folder / "record.json"),
    }
    process = await asyncio.create_subprocess_exec(
        *watched(words, TAIL_BYTES), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=environment_without_keys() | variables, start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        answer = await process.stdout.read()
    finally:
        process.stdin.close()  # ends the program, and all that it started
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    try:
        done = json.loads(answer)
    except ValueError as error:
        raise TaskError(
            "env.agent_command and its watcher were killed: see what does that, as a limit of memory"
        ) from error
    if code := done["status"]:
        raise TaskError(f"env.agent_command ended with status {code}, see its last line: {_last_line(done['err'])}")
    return _last_line(done["out"])


def _reward(line: str) -> Any:
    """The number or the dict of parts on a line; None if it is neither."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) else None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
