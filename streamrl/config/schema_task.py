"""Settings of the task: its records, its environment, its reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from streamrl.config.ranges import ranged

OnEnvError = StrEnum("OnEnvError", ["drop", "floor"])


@dataclass
class DataConfig:
    path: str | None = None
    """Your records: a .jsonl, .json, .csv, .parquet or .arrow file, a folder or a hub name; `split@` before it."""
    test_path: str | None = None
    """Held-out records; null holds a part of `data.path` out."""
    test_ratio: float | None = ranged(None, ge=0, lt=1, why="it is a share of the records")
    """Share that is held out; null is 3 %, at least 20 records or a fifth; 0 evaluates on training prompts."""
    prompt_key: str | None = None
    """Field of the prompt, a text or a list of messages; null takes messages, prompt, question or problem."""
    answer_key: str | None = None
    """Field of the right answer, `a.b` inside a mapping; null takes answer, ground_truth, solution or label."""
    shuffle: bool = True
    """Draw prompts in a seeded random order instead of 0, 1, 2, ..."""
    apply_chat_template: bool = True
    """Render messages with the tokenizer's chat template, if it has one."""
    system_prompt: str | None = None
    """A system message put before the task's own messages."""


@dataclass
class EnvConfig:
    name: str = "string.reverse"
    """Registered task name, or `package.module:Class`."""
    path: str | None = None
    """A Python file with your own task; wins over `env.name`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself, e.g. `env.options.max_length=6`; another task or `{}` drops an experiment's."""
    max_turns: int = ranged(1, gt=0)
    """Most turns of an episode; the last one ends it even if the environment is not done."""
    step_timeout_s: float = ranged(60.0, gt=0)
    """Longest time that one reset or step of an environment may take."""
    num_threads: int = ranged(4, gt=0)
    """Threads in which plain (not async) environments run."""
    on_error: OnEnvError = OnEnvError.drop
    """An environment that raises or hangs: `drop` aborts the trajectory, `floor` gives it `env.reward_floor`."""
    reward_floor: float = 0.0
    """The reward of the whole trajectory of a failed environment under `env.on_error=floor`."""


@dataclass
class RewardConfig:
    type: str | None = None
    """How the answers to records of `data.path` are scored: exact, or your own with env.path=reward.py."""
