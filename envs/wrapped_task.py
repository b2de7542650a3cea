"""A task that plays the records of another one in environments of its own, as with tools or by an agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamrl.environment import Record, Task


class WrappedTask:
    """The records of `base`, which has its name too.

    Args:
        make_env: a fresh environment for each episode.
        taken_over: attributes of the base that it has if the base does.
    """

    tool_prompt = ""
    """The system message describes the tools where the chat template does not show them."""

    def __init__(self, base: Task, make_env: Callable[[], Any], taken_over: Iterable[str]) -> None:
        self.base, self.name, self.env = base, base.name, make_env
        for optional in taken_over:
            if hasattr(base, optional):
                setattr(self, optional, getattr(base, optional))

    def num_records(self, split: str) -> int:
        return self.base.num_records(split)

    def record(self, split: str, index: int) -> Record:
        return self.base.record(split, index)
