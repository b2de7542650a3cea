"""Every setting: its name, type, default, range and one sentence. YAML in `configs/` only composes these.

Names follow one grammar: `num_` counts, `_s` seconds, `_bytes` and `_tokens` sizes. Choices are enums with lower-case
members. A range is declared at its field; rules between settings live in `streamrl.config.rules`. The sections of the
algorithm, of the system and of the task have files of their own; all are imported from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from streamrl.config import LARGEST, Cap, Count, NonNegative, Number, Positive, PositiveInt, Seconds, Share
from streamrl.config.schema_algorithm import *
from streamrl.config.schema_system import *
from streamrl.config.schema_task import *

CriticAvgLevel = StrEnum("CriticAvgLevel", ["token", "sequence"])
CriticKind = StrEnum("CriticKind", ["head", "model"])
EssRule = StrEnum("EssRule", ["none", "sqrt", "linear"])
GroupPolicy = StrEnum("GroupPolicy", ["reissue_missing", "reissue_whole", "accept_partial"])
LoraBase = StrEnum("LoraBase", ["none", "nf4", "int8"])
LoraInit = StrEnum("LoraInit", ["default", "gaussian"])


@dataclass
class TrainerConfig:
    num_steps: PositiveInt = 100
    """Steps to do, then the run ends by itself. A step trains one batch, in `learner.num_minibatches` x
    `learner.num_epochs` optimizer steps; every other setting in steps counts batches too."""
    num_epochs: Positive | None = None
    """Passes over the training records, in place of `trainer.num_steps`: as many steps as they have batches."""
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
    seed: Count = 42
    """One seed for everything: data order, per-lease sampling seeds, initialization."""
    device: str = "auto"
    """Device of the learner: auto, cpu, cuda."""
    num_threads: Count = 1
    """Torch threads of each learner rank on a CPU; 0 leaves torch's own choice."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps whose operations and stages each learner rank records by torch.profiler, e.g. [5,6]: a trace of each in
    profile/ of the run directory, for Perfetto or chrome://tracing."""
    memory_interval_s: Seconds | None = None
    """Sample the memory of each learner rank every so many seconds: profile/memory-rank-0.json in the run directory has
    smallest, largest, mean and standard deviation. Null is off."""
    shutdown_s: Seconds = 10.0
    """How long an orderly stop may take before force is used; a step and its checkpoint may take longer."""


@dataclass
class SamplingConfig:
    temperature: NonNegative = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with this probability mass."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    max_kept: Annotated[int, Meta(gt=0, lt=65536)] = 1024
    """Most tokens that training with top_p or min_p draws from, the most likely: the set travels to the learner."""
    max_new_tokens: PositiveInt = 64
    """Most new tokens of one turn. Where nothing sets it, a model on a GPU gets what it and the GPU hold
    (docs/gpu.md)."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a turn; they stay in the output."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token; null does where the reward ends answers at its own tag
    (`reward.type=think_answer_tags`) and no `stop` is set."""


@dataclass
class SplitConfig:
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How tokens are drawn."""
    member_temperatures: list[Number] = field(default_factory=list)
    """Temperatures of the members of a group in turn, in place of that of the sampling: [0.6,0.8,1.0,1.2]."""
    member_top_p: list[Number] = field(default_factory=list)
    """The same of top_p; each member is trained under the distribution that it was drawn from."""
    final_temperature: Positive | None = None
    """The temperature goes linearly to this, over the groups of `rollout.train.num_annealing_steps` batches."""
    num_annealing_steps: Count = 0
    """Batches of groups until `rollout.train.final_temperature` is reached; groups that filters drop count too."""


@dataclass
class EvalSamplingConfig:
    temperature: NonNegative | None = None
    """As `rollout.train.sampling.temperature`, which null takes; 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Keep the smallest set of tokens with this probability mass; null is as in training."""
    top_k: int | None = None
    """Keep the k most likely tokens, -1 all; null is as in training."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """Keep tokens at least this likely relative to the most likely one; null is as in training."""
    max_new_tokens: PositiveInt | None = None
    """Most new tokens of one turn; null is as in training."""
    stop: list[str] | None = None
    """Texts that end a turn; null is as in training."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token; null is as in training."""


@dataclass
class EvalSplitConfig:
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    """How tokens are drawn; what is null is as in training."""


@dataclass
class RolloutConfig:
    num_prompts_per_step: PositiveInt = 16
    """B: groups of one batch, which a step consumes."""
    num_responses_per_prompt: Annotated[int, Meta(ge=1, le=1024)] = 8
    """G: trajectories of one group."""
    max_prompt_tokens: PositiveInt = 1024
    """Most tokens of a prompt; `data.prompt_overflow` says what becomes of a longer one."""
    train: SplitConfig = field(default_factory=SplitConfig)
    """How training trajectories are sampled."""
    test: EvalSplitConfig = field(default_factory=EvalSplitConfig)
    """How evaluation trajectories are sampled: as in training, unless set."""
    group_policy: GroupPolicy = GroupPolicy.reissue_missing
    """What happens to a group with missing members."""
    num_min_members: PositiveInt = 2
    """Fewest members of a group under `rollout.group_policy=accept_partial`."""


@dataclass
class EvalConfig:
    every_steps: Count = 25
    """Evaluate after every so many steps; the last version is always evaluated unless num_samples is 0."""
    at_start: bool = True
    """Evaluate the starting weights too; the first step waits for it."""
    num_samples: Count = 100
    """Held-out prompts of one evaluation; 0 turns it off, but for sets with a num_samples of their own."""
    num_responses: Annotated[int, Meta(ge=1, le=256)] = 1
    """Answers of each prompt; with more than one, pass@k is logged beside the mean, and they must be sampled."""
    solved_score: Number = 1.0
    """The least score of an answer that counts as right for pass@k."""
    directory: str | None = None
    """A folder that gets a file of each evaluation, SET_step_N.jsonl, with the transcripts of `samples.num_per_eval`
    prompts; null keeps them in samples.jsonl alone."""
    datasets: dict[str, Any] = field(default_factory=dict)
    """More evaluation sets by name: a file, or a mapping of path, data, env, reward, sampling, num_samples ..."""
    pin: bool = True
    """Answer every prompt of an evaluation with one version: actors that take part install the next one afterwards."""
    pin_s: Seconds = 1800.0
    """Longest time for which an evaluation may delay an install; then it ends with the answers that are there."""


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    """adamw, sgd, muon (its vectors, embeddings and head by adamw), adam8bit, or your own `package.module:function`."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of Adam's second moment."""
    eps: Annotated[float, Meta(ge=1e-38, lt=LARGEST)] = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices: decoupled, except with sgd."""
    offload: bool = False
    """Keep the moments in host memory between steps: a GPU holds those of some parameters at a time."""
    options: dict[str, Any] = field(default_factory=dict)
    """The optimizer's own constants: momentum and nesterov of sgd and muon, ns_steps of muon."""
    max_grad_norm: Cap = 1.0
    """Clip the global gradient norm to this."""


@dataclass
class ScheduleConfig:
    name: str = "constant"
    """constant, linear, cosine_with_min_lr, cosine_with_restarts, polynomial, inverse_sqrt, warmup_stable_decay (WSD),
    or your own `package.module:function`, which is called as transformers' `get_wsd_schedule` is."""
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the steps over which the rate rises linearly from 0."""
    num_warmup_steps: Count | None = None
    """The same in steps, in place of the share."""
    decay_ratio: Share = 0.1
    """Share of the steps, at the end, over which warmup_stable_decay falls."""
    min_lr: Number = 0.0
    """What the rate falls to."""
    options: dict[str, Any] = field(default_factory=dict)
    """The schedule's own constants: num_cycles (cosine), power (polynomial), timescale (inverse_sqrt), decay_type
    (WSD)."""


@dataclass
class CriticConfig:
    kind: CriticKind = CriticKind.head
    """`head`: a small network on the policy's hidden states; `model`: a transformer of its own. Built if needed."""
    model_path: str | None = None
    """The critic's start: a model, a reward model (with its head), or RUN/critic of another run; null is the policy's
    own model, with a new value head."""
    num_steps: PositiveInt = 1
    """Optimizer steps of the critic on each batch, however many the policy takes."""
    by_minibatch: bool = False
    """Take an optimizer step of the critic after each of the policy's `learner.num_minibatches`, in every pass."""
    num_warmup_steps: int = 0
    """Steps at the start of a run in which only the critic learns; the policy's learning-rate schedule begins after."""
    frozen: list[str] = field(default_factory=list)
    """Parameters of a critic.kind=model that stay as they are, by name or part of one, for example [self_attn]."""
    clip: Cap | None = None
    """Bound on how far a value may move within one update's loss, from the second of its steps on; null is off."""
    loss_factor: Positive = 0.5
    """Factor of the squared error in the critic's loss, which its gradient clip sees; RL2 has 1."""
    avg_level: CriticAvgLevel = CriticAvgLevel.token
    """How the critic's token losses are averaged: over every `token`, or each `sequence` (trajectory) alike."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))
    """The critic's own optimizer and gradient clip; take a lower rate for critic.kind=model."""
    scheduler: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The critic's own learning-rate schedule, in batches."""


@dataclass
class SchedulerConfig(ScheduleConfig):
    ess_rule: EssRule = EssRule.none
    """Scale the rate of a step by its batch's ESS (`ess/sequence_clipped`): sqrt suits Adam, linear SGD."""
    ess_floor: Share = 0.1
    """Smallest factor that `policy.scheduler.ess_rule` may give."""


@dataclass
class TinyModelConfig:
    enabled: bool = False
    """Make a small random model with a character tokenizer for the task, instead of loading `policy.model_path`."""
    hidden_size: PositiveInt = 64
    """Width of the tiny model."""
    num_layers: PositiveInt = 2
    """Depth of the tiny model."""
    num_heads: PositiveInt = 4
    """Attention heads of the tiny model."""
    num_warm_start_steps: Count = 300
    """Most supervised steps on the task's own answers before the run; 0 starts from random weights."""
    warm_start_until: Number = 0.3
    """Share of exact greedy answers after the warm start: the model is trained well first, then on injected errors."""
    warm_start_lr: Positive = 4e-3
    """Learning rate of these steps."""
    cache_dir: str = "models"
    """Where tiny models are kept; a second run with the same settings takes the first one's."""


@dataclass
class LoraConfig:
    rank: PositiveInt | None = None
    """Train low-rank factors of this rank beside frozen weights (LoRA); null trains every weight."""
    alpha: Positive = 32.0
    """The factors' product is scaled by alpha / rank, so that a good learning rate hardly depends on the rank."""
    lr_scale: Positive = 10.0
    """Factor on `policy.optimizer.lr`: adapters learn best at about ten times the rate of full training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Layers with an adapter, by name or the end of one; all-linear is every linear layer but the output layer. The
    routed experts of a mixture are no such layers."""
    exclude: list[str] = field(default_factory=list)
    """Layers without an adapter, by name or the end of one, of those that `policy.lora.target_modules` names."""
    init: LoraInit = LoraInit.default
    """The first factor at the start, `default` (Kaiming uniform) or `gaussian`; the second one is 0."""
    base_quantization: LoraBase = LoraBase.none
    """Keep the frozen linear layers in 4 bits (nf4) or 8 (int8) by bitsandbytes: QLoRA."""


@dataclass
class PolicyConfig:
    model_path: str | None = None
    """A Hugging Face checkpoint: a local directory, or a name of the model hub (`owner/name`). On the command line it
    turns an experiment's tiny model off."""
    tokenizer_path: str | None = None
    """A folder whose tokenizer and chat template take the place of the model's, for actors, exports and all who load
    them; the model must have a row for each of its tokens."""
    dtype: str = "auto"
    """Compute: auto is float32 on a CPU and bfloat16 on a GPU. Master weights and moments are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations of each layer in the backward pass; where nothing sets it, a GPU that needs it does."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The policy's learning-rate schedule."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train an adapter instead of the weights."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    """A model made on the spot (quickstart, tests)."""


@dataclass
class Config:
    """The whole run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    shadow: ShadowConfig = field(default_factory=ShadowConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
