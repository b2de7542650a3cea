"""Every setting: its name, type, default and one sentence. YAML in `configs/` only composes these.

Names follow one grammar: `num_` counts, `_s` seconds, `_bytes` and `_tokens` sizes. Choices are enums with lower-case
members. Rules between settings live in `streamrl.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Engine(Enum):
    native = "native"
    scripted = "scripted"


class OnInstall(Enum):
    keep = "keep"
    recompute = "recompute"
    finish = "finish"


class OnStale(Enum):
    reissue = "reissue"
    drop = "drop"


class GroupPolicy(Enum):
    reissue_missing = "reissue_missing"
    reissue_whole = "reissue_whole"
    accept_partial = "accept_partial"


class OnEnvError(Enum):
    drop = "drop"
    floor = "floor"


class WireDtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class WandbMode(Enum):
    offline = "offline"
    online = "online"


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
    """One seed for everything: data order, per-lease sampling seeds, initialisation."""
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
class FilterConfig:
    zero_std: bool = False
    """Drop groups whose rewards are all equal: they carry no gradient; others are drawn in their place."""
    min_std: float = 1e-6
    """Rewards that spread less than this count as equal under `filter.zero_std`."""
    accuracy_range: list[float] | None = None
    """[low, high]: drop groups whose mean score is not strictly between; null is off."""


@dataclass
class StalenessConfig:
    eta: int = 1
    """Allowed lead in batches: how far generation may run ahead of training. 0 is strictly synchronous."""
    num_lookahead_groups: int | None = None
    """W: how many later groups may overtake an unfinished one when a batch is cut; null means B."""
    max_lag: int | None = None
    """Hard bound on `version - token version` at the cut; null derives eta + ceil(W / B)."""
    mask_old_tokens: bool = False
    """Mask tokens beyond max_lag instead of refusing their group."""
    on_stale: OnStale = OnStale.reissue
    """A group beyond max_lag at the cut is generated again, or dropped."""


@dataclass
class AdvantageConfig:
    estimator: str = "vtrace_critic_free"
    """Credit assignment: a key of `streamrl.algorithms.ESTIMATORS` that needs no critic."""
    baseline: str = "leave_one_out"
    """Baseline of a group: leave_one_out, group_mean or none."""
    scale: str = "none"
    """Divide centred scores by: none, std (of the group) or batch_std."""
    lam: float = 1.0
    """Trace decay."""
    rho_bar: float = 1.0
    """Cap of the ratio in the last step's error (V-trace)."""
    c_bar: float = 1.0
    """Cap of the ratio in the trace (V-trace)."""


@dataclass
class LossConfig:
    surrogate: str = "ppo_clip"
    """Trust region: a key of `streamrl.algorithms.SURROGATES`."""
    clip_low: float = 0.2
    """Lower clip distance of the ratio from 1."""
    clip_high: float = 0.28
    """Upper clip distance of the ratio from 1."""
    dual_clip: float | None = 3.0
    """Cap of the loss of negative advantages, in units of the advantage; null is off."""
    cap: float | None = None
    """Cap of the importance weight in surrogates that truncate it (tis, cispo, seq_tis ...); null is their own."""
    veto_low: float | None = 1e-4
    """Drop a trajectory if one of its token ratios is below this; null is off."""
    veto_high: float | None = 100.0
    """Drop a trajectory if one of its token ratios is above this; null is off."""
    entropy_coef: float = 0.0
    """Bonus on the mean token entropy."""
    behavior_penalty: float = 0.0
    """Weight of the squared log-ratio that pulls the policy back to where its data came from."""
    avg_level: str = "token-mean"
    """How token losses are averaged: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm,
    prompt-mean."""
    allow_uncorrected: bool = False
    """Permit training on stale data without any importance ratio (negative control of experiments)."""


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this."""


@dataclass
class SchedulerConfig:
    name: str = "constant"
    """constant, linear or cosine_with_min_lr."""
    warmup_ratio: float = 0.0
    """Share of the steps over which the rate rises linearly from 0."""
    min_lr: float = 0.0
    """Where linear and cosine end."""


@dataclass
class TinyModelConfig:
    enabled: bool = False
    """Make a small random model with a character tokenizer for the task, instead of loading `policy.model_path`."""
    hidden_size: int = 64
    """Width of the tiny model."""
    num_layers: int = 2
    """Depth of the tiny model."""
    num_heads: int = 4
    """Attention heads of the tiny model."""
    num_warm_start_steps: int = 300
    """Most supervised steps on the task's own answers before the run; 0 starts from random weights."""
    warm_start_until: float = 0.3
    """Share of exact greedy answers that the start leaves the model with: taught well first, then made careless."""
    warm_start_lr: float = 4e-3
    """Learning rate of these steps."""
    cache_dir: str = "models"
    """Where made models are kept; a second run with the same settings takes the first one's."""


@dataclass
class PolicyConfig:
    model_path: str | None = None
    """A local Hugging Face checkpoint directory."""
    dtype: str = "auto"
    """Compute: auto is float32 on a CPU and bfloat16 on a GPU. Master weights and moments are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations of each layer in the backward pass."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The policy's learning-rate schedule."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    """A model made on the spot (quickstart, tests)."""


@dataclass
class LearnerConfig:
    max_tokens_per_device: int = 4096
    """Token budget of one packed micro-batch on one rank; must hold the longest prompt and response."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at once."""
    rank_timeout_s: float = 600.0
    """Longest wait of a rank for the others before the gang gives up."""
    stall_report_s: float = 30.0
    """With no batch for this long, say who is waited for, again and again."""
    stall_fail_s: float = 600.0
    """Actors are there but nothing comes for this long: exit with the reason; 0 never."""


@dataclass
class ActorsConfig:
    engine: Engine = Engine.native
    """Inference engine of the actors."""
    num_concurrent: int = 64
    """Trajectories that one actor runs at once."""
    device: str = "auto"
    """Device of the engine: auto, cpu, cuda."""
    dtype: str = "auto"
    """Compute type of the engine; auto is float32 on a CPU."""
    num_threads: int = 1
    """Torch threads of one actor on a CPU; 0 leaves torch's own choice."""
    on_install: OnInstall = OnInstall.keep
    """Running sequences at a new version: `keep` their cache, `recompute` it, or let them `finish` first."""
    actor_id: str | None = None
    """Stable name of this actor; null makes one from the host and a random part."""
    give_up_after_s: float = 0.0
    """Exit after this long without a hub; 0 retries for ever."""
    transports: list[str] = field(default_factory=lambda: ["shm", "zmq"])
    """Weight transports this actor may use, best first."""


@dataclass
class HubConfig:
    bind: str = "tcp://127.0.0.1:0"
    """Where the hub listens; port 0 takes a free one, which is printed and written to `hub.json`."""
    weights_port: int = 0
    """Port of the weight socket, on the same address; 0 takes a free one. Fix it to reach it through a tunnel."""
    advertise: str | None = None
    """Host name or address that actors should use for the weight socket; null is the bind address."""
    heartbeat_s: float = 1.0
    """Interval of the beats of both sides."""
    dead_after_s: float = 5.0
    """An actor silent for this long loses its leases to others."""
    lease_ttl_s: float = 600.0
    """A lease without progress for this long goes to another actor."""
    num_max_attempts: int = 3
    """A group that failed this often is dropped."""
    group_deadline_s: float = 0.0
    """Incomplete groups older than this follow `rollout.group_policy`; 0 never."""


@dataclass
class PublishConfig:
    dtype: WireDtype = WireDtype.auto
    """Type in which weights travel; auto is float32 on a CPU and bfloat16 on a GPU."""
    bucket_bytes: int = 16 << 20
    """Size of a digest and transfer unit."""
    num_keep_versions: int = 2
    """Published versions that stay available."""
    max_bytes_per_s: int = 0
    """Cap of the hub's bandwidth for pulled weights; 0 is none."""


@dataclass
class CheckpointConfig:
    every_steps: int = 25
    """Save after every so many steps (more often if actors' outboxes could not hold what lies between), and at the
    end; 0 only at the end."""
    resume: bool = False
    """Go on from the newest good checkpoint of this run directory (or of the newest run of this name)."""
    num_keep: int = 2
    """Checkpoints that are kept."""


@dataclass
class EvalConfig:
    every_steps: int = 25
    """Evaluate after every so many steps; the first and last version are always evaluated unless num_samples is 0."""
    num_samples: int = 100
    """Held-out prompts of one evaluation; 0 turns evaluation off."""


@dataclass
class WandbConfig:
    enabled: bool = False
    """Also log to Weights & Biases."""
    mode: WandbMode = WandbMode.offline
    """offline writes locally, online talks to the service."""


@dataclass
class TrackingConfig:
    project: str = "streamrl"
    """Project name for trackers."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""


@dataclass
class LaunchConfig:
    num_actors: int = 2
    """Actors that `streamrl launch` starts and keeps alive."""
    num_learner_ranks: int = 1
    """Learner processes (FSDP2 ranks) that `streamrl launch` starts through torchrun."""
    num_max_restarts: int = 20
    """Restarts of an actor before launch gives up on it; two minutes of health set the count back."""


@dataclass
class Config:
    """The whole run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
