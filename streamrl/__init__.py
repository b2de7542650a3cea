"""streamrl: asynchronous off-policy reinforcement learning for language models.

The public face: `train`, `resume`, `load_run` and `Trainer`, and what a user's own task implements. Everything else is
imported from its own module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamrl.environment import ChatMessage, Env, Record, RewardFunction, SingleTurnTask, Step, Task
from streamrl.messages import Group, Member
from streamrl.version import __version__

if TYPE_CHECKING:
    from streamrl.api import Metrics, Run, load_run, resume, train
    from streamrl.api.trainer import Trainer, recorded_group

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


def __getattr__(name: str) -> Any:
    """Names of `streamrl.api` are imported on first use: a task file needs neither hydra nor the launcher."""
    if name in ("Metrics", "Run", "load_run", "resume", "train"):
        from streamrl import api

        return getattr(api, name)
    if name in ("Trainer", "recorded_group"):  # apart from the others, because it loads torch
        from streamrl.api import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
