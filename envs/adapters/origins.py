"""Names that files written for other projects import from there.

A file may say `from RL2.datasets import Sample, base_generate` although nothing of that project but the environment is
used. Where the project is not installed, these few names stand in for it while the file is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from streamrl.environment import ChatMessage
from streamrl.errors import TaskError


@dataclass
class Sample:
    """What `env_step(sample)` of RL2 reads: the record, and input and output of the model's last turn."""

    sample: dict[str, Any] = field(default_factory=dict)
    state_text: str = ""
    action_text: str = ""
    turn: int = 0


class BaseRewardFunction:
    """The base of rewards of rl4llm: a name, and `__call__(messages, ground_truth, **kwargs)`."""

    def __init__(self, name: str) -> None:
        self.name = name


def base_generate(*args: Any, **options: Any) -> Any:
    """Never called: actors drive the generation themselves."""
    raise TaskError("base_generate was called by the file: leave the call out, actors generate and call its env_step.")


STANDING_IN: Mapping[str, Mapping[str, Any]] = {
    "RL2.datasets": {"Sample": Sample, "base_generate": base_generate},
    "rl4llm.core.base_env": {
        "BaseRewardFunction": BaseRewardFunction, "ChatMessage": ChatMessage,
        "BaseMDPEnv": type("BaseMDPEnv", (), {}), "EnvState": type("EnvState", (), {}),
    },
}
"""By module: the names that may be imported from it."""


@contextmanager
def origins_importable() -> Iterator[None]:
    """Inside, the modules above can be imported; those that are installed are the real ones."""
    added = []
    for name, names in STANDING_IN.items():
        if name.partition(".")[0] in sys.modules or find_spec(name.partition(".")[0]) is not None:
            continue
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:length]))
            module.__path__ = []  # a package, so that what it lacks is a ModuleNotFoundError with its whole name
            sys.modules[module.__name__] = module
            added.append(module.__name__)
        vars(module).update(names)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)
