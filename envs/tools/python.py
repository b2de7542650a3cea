"""Run a program that the model wrote in the sandbox, and show what it printed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from envs.sandbox import Limits, SandboxPool
from streamrl.config.schema import Sandbox, ToolUseConfig

LEVELS = {Sandbox.auto: "auto", Sandbox.limited: "1", Sandbox.isolated: "2"}


class PythonTool:
    """Each call is a program of its own in a fresh sandbox; nothing is kept from one call to the next."""

    name = "python"
    description = "Run a Python program and read what it prints. Nothing is kept from one call to the next."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the whole program; print what you want to read"}},
        "required": ["code"],
    }

    def __init__(self, settings: ToolUseConfig) -> None:
        self._settings = settings
        self._pool: SandboxPool | None = None
        self._lock = threading.Lock()

    def call(self, arguments: Mapping[str, Any]) -> str:
        limit_s = self._settings.timeout_s
        outcome = self._sandboxes().run(arguments["code"], total_s=limit_s)[0]
        if outcome.status == "ok":
            return outcome.stdout or "(no output; print what you want to read)"
        if outcome.status == "timeout":
            return f"{outcome.stdout}\nError: the program ran for more than {limit_s:g} s.".lstrip()
        what = outcome.stderr.strip() or f"the program ended with {outcome.status}"
        return f"{outcome.stdout}\nError: {what}".lstrip()

    def _sandboxes(self) -> SandboxPool:
        """Made at the first call: the learner describes the tool and never runs a program."""
        with self._lock:
            if self._pool is None:
                self._pool = SandboxPool(
                    LEVELS[self._settings.sandbox], limits=Limits(timeout_s=self._settings.timeout_s)
                )
            return self._pool
