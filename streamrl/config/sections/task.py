"""What is learned, and how it is sampled: the run, the data, the environment, the rollouts, the evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamrl.config.sections.choices import GroupPolicy, OnEnvError


@dataclass
class TrainerConfig:
    num_steps: int = 100
    """Optimizer steps to do; the run ends by itself after them."""
    eval_only: bool = False
    """Evaluate the starting weights once and exit; nothing is trained."""


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run; its directory is `<root>/<name>-<number>`."""
    root: str = "runs"
    """Where run directories are made."""
    dir: str | None = None
    """The run directory itself, when it should not be chosen by name and number."""
    seed: int = 42
    """One seed for everything: data order, per-lease sampling seeds, initialization."""
    device: str = "auto"
    """Device of the learner: auto, cpu, cuda."""
    num_threads: int = 1
    """Torch threads of each learner rank on a CPU; 0 leaves torch's own choice."""
    shutdown_s: float = 10.0
    """How long an orderly stop may take before processes are ended by force."""


@dataclass
class DataConfig:
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
    """Options of the task itself, e.g. `env.options.max_length=6`."""
    max_turns: int = 1
    """Most turns of an episode; the last one ends it even if the environment is not done."""
    step_timeout_s: float = 60.0
    """Longest time that one reset or step of an environment may take."""
    num_threads: int = 4
    """Threads in which plain (not async) environments run."""
    on_error: OnEnvError = OnEnvError.drop
    """An environment that raises or hangs: `drop` aborts the trajectory, `floor` gives it `env.reward_floor`."""
    reward_floor: float = 0.0
    """The reward of a failed environment under `env.on_error=floor`."""


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this probability mass."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    max_new_tokens: int = 64
    """Most new tokens of one turn."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a turn; they stay in the output."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token (benchmarks only)."""


@dataclass
class SplitConfig:
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How tokens are drawn."""


@dataclass
class RolloutConfig:
    num_prompts_per_step: int = 16
    """B: groups consumed by one optimizer step."""
    num_responses_per_prompt: int = 8
    """G: trajectories of one group."""
    max_prompt_tokens: int = 1024
    """Longer prompts are refused by the actor and counted."""
    train: SplitConfig = field(default_factory=SplitConfig)
    """How training trajectories are sampled."""
    test: SplitConfig = field(default_factory=lambda: SplitConfig(SamplingConfig(temperature=0.0)))
    """How evaluation trajectories are sampled; greedy by default."""
    group_policy: GroupPolicy = GroupPolicy.reissue_missing
    """What happens to a group with missing members."""
    num_min_members: int = 2
    """Fewest members of a group under `rollout.group_policy=accept_partial`."""


@dataclass
class EvalConfig:
    every_steps: int = 25
    """Evaluate after every so many steps; the first and last version are always evaluated unless num_samples is 0."""
    num_samples: int = 100
    """Held-out prompts of one evaluation; 0 turns evaluation off."""
