"""streamrl: asynchronous off-policy reinforcement learning for language models.

The public face: `train`, `resume`, `load_run` and `Trainer`, and what a user's own task implements. Everything else is
imported from its own module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamrl.environment import ChatMessage, Env, Record, RewardFunction, SingleTurnTask, Step, Task
from streamrl.messages import Group, Member
from streamrl.version import __version__

if TYPE_CHECKING:
    from streamrl.api.runs import Metrics, Run, load_run
    from streamrl.api.trainer import Trainer, recorded_group
    from streamrl.api.training import resume, train

__all__ = [
    "ChatMessage",
    "Env",
    "Group",
    "Member",
    "Metrics",
    "Record",
    "RewardFunction",
    "Run",
    "SingleTurnTask",
    "Step",
    "Task",
    "Trainer",
    "__version__",
    "load_run",
    "recorded_group",
    "resume",
    "train",
]


HOMES = {
    "Metrics": "runs", "Run": "runs", "load_run": "runs", "resume": "training", "train": "training",
    "Trainer": "trainer", "recorded_group": "trainer",
}
"""Name -> its module of `streamrl.api`; that of `Trainer` loads torch."""


def __getattr__(name: str) -> Any:
    """Names of `streamrl.api` are imported on first use: a task file needs neither hydra nor the launcher."""
    if name in HOMES:
        return getattr(import_module(f"streamrl.api.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
