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
    vllm = "vllm"
    scripted = "scripted"


class OnInstall(Enum):
    keep = "keep"
    recompute = "recompute"
    finish = "finish"


class OnStale(Enum):
    reissue = "reissue"
    drop = "drop"


class StalenessMode(Enum):
    drop = "drop"
    mask_old_tokens = "mask_old_tokens"
    reweight = "reweight"
    wait = "wait"


class AdaptiveRule(Enum):
    ess = "ess"
    goodput = "goodput"
    fixed = "fixed"


class PublishWhen(Enum):
    every_step = "every_step"
    drift = "drift"


class EssRule(Enum):
    none = "none"
    sqrt = "sqrt"
    linear = "linear"


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


class EntropyAdapt(Enum):
    none = "none"
    coef = "coef"
    clip_high = "clip_high"


class ConstraintMethod(Enum):
    lagrangian = "lagrangian"
    pid = "pid"
    penalty = "penalty"


class Discount(Enum):
    token = "token"
    turn = "turn"


class Segment(Enum):
    turn = "turn"
    block = "block"


class CriticKind(Enum):
    head = "head"
    model = "model"


class VetoStat(Enum):
    any = "any"
    mean = "mean"


class OpsmWhen(Enum):
    always = "always"
    over_budget = "over_budget"


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
    truncated: bool = False
    """Leave trajectories that hit the length limit out of the loss; they still count in their group's baseline."""
    accuracy_range: list[float] | None = None
    """[low, high]: drop groups whose mean score is not strictly between; null is off."""


@dataclass
class AdaptiveConfig:
    enabled: bool = False
    """Let measured staleness move eta and max_lag during the run; they start from the values set above."""
    rule: AdaptiveRule = AdaptiveRule.ess
    """What moves the lead: `ess` keeps the predicted ESS at its target, `goodput` climbs groups per second times ESS,
    `fixed` leaves it to the circuit breaker alone."""
    min_eta: int = 1
    """Smallest lead that the rule may choose; the circuit breaker may go below it."""
    max_eta: int = 16
    """Largest lead that the rule may choose."""
    ess_target: float = 0.5
    """ESS of whole trajectories (`ess/sequence_clipped`) that the largest admitted lag should still have."""
    m2_target: float = 0.04
    """Budget of drift, mean squared log-ratio of a token: for off-policy masking, publishing and the group spread."""
    half_life_steps: float = 30.0
    """Steps after which an old measurement of the drift counts half."""
    num_trial_steps: int = 20
    """Steps for which `goodput` measures one lead before it tries the next."""
    breaker: bool = True
    """Halve the lead when the ESS falls, gradients jump or drift oscillates; drain the queue in the worst case."""
    group_spread: bool = False
    """Give trajectories of one group baselines of their own when their lags differ by more than the drift allows."""


@dataclass
class OverlongConfig:
    cache_ratio: float = 0.0
    """Soft overlong penalty: the reward falls by up to 1 over this last part of the allowed new tokens; 0 is off."""
    scale: float = 1.0
    """Size of the penalty at the limit."""


@dataclass
class ObjectivesConfig:
    combine: str = "reward"
    """What is trained on: the task's reward, or its named scores as weighted_sum, tchebycheff, gdpo, or a weighted sum
    with a bonus in the group for not being dominated (pareto) or for volume that only it covers (hypervolume)."""
    components: dict[str, float] = field(default_factory=dict)
    """Name of a score -> weight; a negative weight makes smaller better. Two or more also keep a Pareto archive."""
    ideal: dict[str, float] = field(default_factory=dict)
    """The point that tchebycheff aims at; what is not given is the best seen in the run."""
    reference_point: dict[str, float] = field(default_factory=dict)
    """What a point must exceed to have any hypervolume."""
    bonus: float = 0.1
    """Weight of the group bonus of pareto and hypervolume."""
    archive_size: int = 100
    """Most evaluations in pareto.json."""


@dataclass
class StalenessConfig:
    eta: int = 1
    """Allowed lead in batches: how far generation may run ahead of training. 0 is strictly synchronous."""
    num_lookahead_groups: int | None = None
    """W: how many later groups may overtake an unfinished one when a batch is cut; null means B (0 with mode=wait)."""
    max_lag: int | None = None
    """Bound on `version - token version` at the cut; null derives eta + ceil(W / B)."""
    mode: StalenessMode = StalenessMode.drop
    """Beyond max_lag: `drop` the group; `mask_old_tokens` and train the others; `reweight` old tokens down to a hard
    bound; or `wait` for the oldest group at every cut, so that none gets there."""
    hard_max_lag: int | None = None
    """Under mode=reweight: the lag at which a group is refused after all; null derives eta + ceil(W / B)."""
    decay: float = 0.5
    """Under mode=reweight: factor on a token's loss for each step of its lag beyond max_lag."""
    on_stale: OnStale = OnStale.reissue
    """A group that is refused for its lag is generated again, or dropped."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    """The staleness control."""


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
class AdvantageConfig:
    estimator: str = "group"
    """Credit assignment: a key of `streamrl.algorithms.ESTIMATORS`; those that need values bring a critic."""
    baseline: str = "leave_one_out"
    """Baseline of a group: leave_one_out, group_mean, none, weighted_leave_one_out, opob. With a critic it centres the
    rewards."""
    scale: str = "none"
    """Divide centred scores by: none, std (of the group) or batch_std."""
    whiten: str = "none"
    """Normalise the advantages of all tokens of a batch to mean 0 and std 1: none or batch."""
    gamma: float = 1.0
    """Discount of later rewards."""
    discount: Discount = Discount.token
    """Apply gamma at every `token`, or once at the end of every `turn`."""
    lam: float = 1.0
    """Trace decay."""
    rho_bar: float = 1.0
    """Cap of the ratio in the last step's error (V-trace)."""
    rho_bar_ess_target: float | None = None
    """Choose rho_bar every step: the largest cap up to 10 whose clipped-sequence ESS reaches this; null is off."""
    c_bar: float = 1.0
    """Cap of the ratio in the trace (V-trace)."""
    rho_bar_pg: float | None = None
    """Cap of the token's own ratio inside the estimator (published IMPALA form); null leaves it to the surrogate."""
    segment: Segment = Segment.turn
    """Segments of `vtrace_segments`: whole turns, or blocks of `advantage.segment_tokens`."""
    segment_tokens: int = 32
    """Tokens of one block."""
    weight_cap: float = 2.0
    """Cap of the sequence ratios that weigh siblings in `weighted_leave_one_out` and `opob`."""
    min_ess: float = 2.0
    """With fewer effective siblings `weighted_leave_one_out` is a plain leave-one-out."""
    options: dict[str, Any] = field(default_factory=dict)
    """The estimator's own constants by name, e.g. {n: 8} of n_step, {eps: 0.2} of clipped_is, {leak: 0.9} of vtrace."""


@dataclass
class CriticConfig:
    kind: CriticKind = CriticKind.head
    """`head`: a small network on the policy's hidden states; `model`: a transformer of its own. Built if needed."""
    model_path: str | None = None
    """Checkpoint that a critic model starts from; null is the policy's own."""
    num_steps: int = 1
    """Critic updates per policy update."""
    num_warmup_steps: int = 0
    """Steps at the start of a run in which only the critic learns."""
    clip: float | None = None
    """Bound on how far a value may move within one update's loss, from the second of its steps on; null is off."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))
    """The critic's own optimizer and gradient clip; take a lower rate for critic.kind=model."""


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
    options: dict[str, Any] = field(default_factory=dict)
    """The surrogate's own constants by name, e.g. {budget: 0.04} of m2po, {ratio_cap: 4} of ppo_clip."""
    anchor: str | None = None
    """Whom the ratio is taken against: behavior, recomputed, loglinear, ewma; null is the surrogate's usual one."""
    ewma_decay: float = 0.95
    """Per step, of the averaged weights behind `loss.anchor=ewma`."""
    correction: str = "disabled"
    """Importance weights and rejection between actor and learner: a key of `streamrl.algorithms.CORRECTION_PRESETS`."""
    opsm_delta: float | None = None
    """Drop harmful tokens of trajectories whose mean log-ratio is below minus this; null is off."""
    opsm_when: OpsmWhen = OpsmWhen.always
    """`over_budget` masks them only while the drift at the mean lag exceeds its target."""
    zscore_bound: float | None = None
    """Drop harmful tokens whose log-ratio is this many standard deviations of their lag's drift; null is off."""
    veto_low: float | None = 1e-4
    """Drop a trajectory if one of its token ratios is below this; null is off."""
    veto_high: float | None = 100.0
    """Drop a trajectory if one of its token ratios is above this; null is off."""
    veto_stat: VetoStat = VetoStat.any
    """Compare `any` single ratio of the trajectory with the bounds, or their `mean`."""
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
class KlConfig:
    mode: str = "off"
    """Pull towards the reference model: off; in the reward (reward_k1); in the advantages (advantage); in the loss
    (k2_is, k1_is, k3_is, k2, k3, k1+, k3+)."""
    coef: float | None = None
    """Weight of the KL term, where a controller starts; null is 0.001 if constant, else 0.2."""
    cap: float = 2.0
    """Cap of the KL term's own importance weight (k2_is, advantage without a ratio, constraint.kl_limit)."""
    allow_biased: bool = False
    """Permit k3, and on stale data k2, k1+ and k3+, whose gradient is not that of the reverse KL."""
    controller: str = "constant"
    """Who moves the weight each step: constant, exponential, linear, pid, horizon, doubling, log_integral, schedule."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the controller by their name in `streamrl.algorithms`, e.g. `kl.options.target=0.01`."""

    def __post_init__(self) -> None:
        if self.mode == "False":  # YAML reads a bare `off` as false
            self.mode = "off"


@dataclass
class ReferenceConfig:
    model_path: str | None = None
    """The KL term's reference model, a local checkpoint with the policy's vocabulary; null is the run's start."""
    sync_every_steps: int = 0
    """The reference becomes the policy of the moment every so many steps; 0 never."""


@dataclass
class EntropyConfig:
    target: float | None = None
    """Mean token entropy in nats that `entropy.adapt` steers to; the bonus rests while the entropy is above it."""
    adapt: EntropyAdapt = EntropyAdapt.none
    """What moves to hold the target: `coef` moves loss.entropy_coef, `clip_high` moves loss.clip_high, none nothing."""
    step: float = 0.005
    """How far it moves per optimizer step."""
    low: float | None = None
    """Lowest value it may take; null is 0 for the bonus and 0.2 for the clip."""
    high: float | None = None
    """Highest value it may take; null is 1 for the bonus and 0.5 for the clip."""


@dataclass
class ConstraintConfig:
    kl_limit: float | None = None
    """The mean KL to the reference model in nats per token must stay below this; null is off."""
    entropy_min: float | None = None
    """The mean token entropy in nats must stay above this; null is off."""
    method: ConstraintMethod = ConstraintMethod.lagrangian
    """How a violation becomes a weight: dual ascent, a PID controller, or the slope of a squared penalty."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the method by their name in `streamrl.algorithms`, e.g. `constraint.options.lr=0.1`."""
    one_sided: bool = False
    """A weight that is left over acts only while the constraint is violated."""


@dataclass
class SchedulerConfig:
    name: str = "constant"
    """constant, linear or cosine_with_min_lr."""
    warmup_ratio: float = 0.0
    """Share of the steps over which the rate rises linearly from 0."""
    min_lr: float = 0.0
    """Where linear and cosine end."""
    ess_rule: EssRule = EssRule.none
    """Scale the rate of a step by its batch's ESS (`ess/sequence_clipped`): sqrt suits Adam, linear SGD."""
    ess_floor: float = 0.1
    """Smallest factor that `policy.scheduler.ess_rule` may give."""


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
    vllm: dict[str, Any] = field(default_factory=dict)
    """vLLM's own engine arguments under `actors.engine=vllm`, e.g. `actors.vllm.tensor_parallel_size=2`."""
    actor_id: str | None = None
    """Stable name of this actor; null makes one from the host and a random part."""
    give_up_after_s: float = 0.0
    """Exit after this long without a hub; 0 retries for ever."""
    transports: list[str] = field(default_factory=lambda: ["shm", "zmq"])
    """Weight transports this actor may use, best first."""
    relay: str | None = None
    """A `streamrl relay` that this actor pulls weights from, tcp://HOST:PORT; the learner if it does not answer."""
    share_weights: bool = True
    """Leave pulled weights in shared memory for the other actors of this host, and take what they left."""


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
    transports: list[str] = field(default_factory=lambda: ["shm", "zmq"])
    """Ways in which weights are offered, best first: ipc (inside one GPU) and nccl (broadcast to GPUs) need a GPU here,
    shm reaches this machine, zmq everybody. An actor takes the first one that it may use and that it can prove."""
    nccl_init_deadline_s: float = 20.0
    """For all members to build a communicator; whoever is later is left out of it and pulls."""
    nccl_bucket_deadline_s: float = 10.0
    """For one bucket to reach everybody by broadcast or slot; then the broadcast is aborted."""
    dtype: WireDtype = WireDtype.auto
    """Type in which weights travel; auto is float32 on a CPU and bfloat16 on a GPU."""
    bucket_bytes: int = 16 << 20
    """Size of a digest and transfer unit."""
    num_keep_versions: int = 2
    """Published versions that stay available."""
    max_bytes_per_s: int = 0
    """Cap of the hub's bandwidth for pulled weights; 0 is none."""
    delta_max_ratio: float = 0.25
    """Actors that pull get just what changed since the version they hold, if at most this part of all; 0 never."""
    when: PublishWhen = PublishWhen.every_step
    """Publish after every step, or only once the predicted drift since the last one exceeds a quarter of
    `staleness.adaptive.m2_target` (and before the actors' lead runs out)."""
    probe_every: int = 20
    """Every so many versions, and at a learner's first, actors must score fixed tokens as the learner does; 0 never."""
    probe_tolerance: float = 0.1
    """Largest mean difference of those log-probs, in nats; an actor beyond it gets no leases until it passes again."""


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
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
