"""Settings of the system: learner, actors, hub, weights, checkpoints, trackers, launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from streamrl.config import Count, NonNegative, Positive, PositiveInt, Seconds, SecondsOrZero, Share

Attention = StrEnum(
    "Attention", ["auto", "sdpa", "eager", "varlen", "flex_attention", "flash_attention_2", "flash_attention_3"]
)
OnInstall = StrEnum("OnInstall", ["keep", "recompute", "finish"])
PublishWhen = StrEnum("PublishWhen", ["every_step", "every_optimizer_step", "drift"])
Pruner = StrEnum("Pruner", ["none", "median", "asha"])
SweepLauncher = StrEnum("SweepLauncher", ["local", "submitit_slurm", "submitit_local"])
BesideTraining = StrEnum("BesideTraining", ["auto", "always", "never"])
RolloutWeights = StrEnum("RolloutWeights", ["full", "int8"])
SkipZeroAdvantage = StrEnum("SkipZeroAdvantage", ["auto", "always", "never"])
StreamFsync = StrEnum("StreamFsync", ["interval", "always", "never"])
StreamKeep = StrEnum("StreamKeep", ["all", "recovery"])
SweepDirection = StrEnum("SweepDirection", ["maximize", "minimize"])
WandbMode = StrEnum("WandbMode", ["offline", "online"])
WireDtype = StrEnum("WireDtype", ["auto", "float32", "bfloat16"])


@dataclass
class MeshConfig:
    replicate: PositiveInt = 1
    """Copies of the sharded model, which add gradients up once a step: 2 where the ranks of each of two machines hold a
    copy, so that only gradients cross between them. It must divide `launch.num_learner_ranks`."""
    shard: PositiveInt | None = None
    """Ranks that share one copy (FSDP2); null is all that the other axes leave."""
    context: PositiveInt = 1
    """Ranks that each compute a part of every packed row, so that a trajectory may be that much longer than the budget
    of one; they train on the same groups. Attention gathers keys and values over them."""
    tensor: PositiveInt = 1
    """Ranks that divide every matrix and train on the same groups, for layers that are too large for one device; by the
    model's plan in transformers, and a model without one is refused. These ranks should be on one machine."""


@dataclass
class LearnerConfig:
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the learner's ranks divide the model."""
    num_minibatches: PositiveInt = 1
    """K: equal parts of a batch, in whole groups, that get an optimizer step each; it must divide
    `rollout.num_prompts_per_step`."""
    num_epochs: PositiveInt = 1
    """E: passes over a batch. It takes K x E optimizer steps; versions and lags count optimizer steps."""
    stop_kl: Positive | None = None
    """Leave the rest of a batch's K x E steps out once a step measured more than this KL of the policy to the recorded
    behavior (`drift/k3`, nats per token), as PPO's target KL does; versions count them all the same. Null is off."""
    max_tokens_per_device: PositiveInt = 4096
    """Token budget of one packed micro-batch on one rank; times `learner.mesh.context` it must hold the longest prompt
    and response. Where nothing sets it, a GPU gets what its memory holds (docs/gpu.md)."""
    max_inference_tokens_per_device: PositiveInt | None = None
    """The budget of passes without gradient, which need less memory: those before a batch's first step (a critic.kind=
    model, a reference, whitening ...), of what is only measured, audits, held-out records. Null is the same budget."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    share_prompts: bool = True
    """Compute a prompt once for all answers to it in a micro-batch, and once what its prompts begin with; models for
    which that is not exact never do."""
    attention: Attention = Attention.auto
    """Kernel of the learner's attention: sdpa, or eager, plain matrix products; on a GPU also varlen (the flash kernel
    of PyTorch), flex_attention, flash_attention_2 and flash_attention_3 (their packages); auto is varlen on a
    GPU in half precision, else sdpa."""
    compile: bool = False
    """Compile every decoder layer of the policy with torch.compile: the first steps are slow, later ones faster; a
    critic of `critic.kind=model` is not compiled. Where nothing sets it, a GPU that can compile does (docs/gpu.md)."""
    reduce_once: bool = False
    """Add the gradients of all ranks up once per optimizer step instead of after every micro-batch: less traffic, and 4
    bytes more of memory for each parameter on every rank."""
    reshard_after_forward: bool = True
    """Free each layer's gathered weights after its forward pass (ZeRO-3). `false` keeps those of the trained model to
    its backward pass (ZeRO-2): one all-gather a micro-batch in place of two, for the memory of all weights in
    `policy.dtype`; moments and gradients stay sharded."""
    skip_zero_advantage: SkipZeroAdvantage = SkipZeroAdvantage.auto
    """Make no pass over trajectories that cannot change the gradient, as in groups of equal rewards: `auto`, or only a
    forward pass if a control or a shadow reads their ratios (`staleness.adaptive`, `shadow.algorithms` ...); `always`
    (these then see the other trajectories alone); or `never`. Where a KL or entropy term or a critic reads them,
    they keep both passes."""
    gradient_cosine: bool = False
    """Measure how far each step's gradient points along that of the step before (`policy/grad_cosine`), which old data
    align; keeps a copy of the gradient, 4 bytes a trained parameter on the rank that holds it."""
    rank_timeout_s: Seconds = 600.0
    """Longest wait of a rank for the others before the process group gives up."""
    rank_silent_s: SecondsOrZero = 20.0
    """With several ranks: one that has sent no heartbeat for this long (stopped, swapped out, cut off) ends the
    process group, by name; a killed one ends it at once. 0 waits for `learner.rank_timeout_s`."""
    stall_report_s: Seconds = 30.0
    """With no batch for this long, report what the run waits for; repeated at this interval."""
    stall_fail_s: SecondsOrZero = 600.0
    """Actors are connected but no group that is kept comes for this long, or for half a second per token of the longest
    answer if that is more: exit with the reason; 0 never."""
    gpu_memory_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Part of its GPU's memory that a learner rank may take, moments first; null is all of it, or what
    `streamrl launch` sets where actors share the GPU (half)."""
    num_max_skipped_steps: Count = 10
    """Optimizer steps that may be skipped for gradients that are not finite, or batches set aside because they cannot
    be packed, before the run ends with the cause; each step that succeeds takes one back. 0 never ends it."""

    @property
    def max_row_tokens(self) -> int:
        """Token budget of a packed row, which the ranks of the context axis compute together."""
        return self.max_tokens_per_device * self.mesh.context

    @property
    def max_inference_row_tokens(self) -> int:
        """The same for passes without gradient."""
        return (self.max_inference_tokens_per_device or self.max_tokens_per_device) * self.mesh.context


@dataclass
class EndpointConfig:
    bind: str = "127.0.0.1:0"
    """Where an actor serves agents over HTTP (`env.agent`, `env.agent_command`), HOST:PORT; port 0 takes a free one."""
    advertise: str | None = None
    """Host name, address or network interface that agents should use, as from inside a container, or a whole URL; null
    is that of `actors.endpoint.bind`."""
    admin_key_env: str | None = None
    """The environment variable with the key under which programs open episodes (`env.agent=outside`) and read them."""


@dataclass
class ActorsConfig:
    engine: str = "auto"
    """Inference engine of the actors: native, vllm or your own `package.module:factory`; auto is vllm where it is
    installed and a GPU is visible to the process that reads the settings, and native elsewhere and for a tiny model."""
    num_concurrent: PositiveInt = 64
    """Trajectories that one actor runs at once; where nothing sets it, vLLM on a GPU gets what its memory holds."""
    device: str = "auto"
    """Device of the engine: auto, cpu, cuda."""
    dtype: str = "auto"
    """Compute type of the engine; auto is float32 on a CPU."""
    weights: RolloutWeights = RolloutWeights.full
    """`int8` rounds the matrices of linear layers as they come, with a scale for each row, and on a CPU multiplies the
    large ones of Llama, Qwen2 and Qwen3 in int8 (native engine). `drift/mismatch` measures the difference, and ratios
    correct it."""
    gpu_memory_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Part of its GPU's memory that the engine plans with; null is all that is free, or what `streamrl launch` sets
    where actors share a GPU (what the learner leaves, divided by them)."""
    num_threads: Count = 1
    """Torch threads of one actor on a CPU; 0 leaves torch's own choice."""
    on_install: OnInstall = OnInstall.keep
    """Running sequences at a new version: switch to it and `keep` their cache or `recompute` it, or `finish` under
    their own: whole models are installed after that, adapters (policy.lora.rank) serve beside each other."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """vLLM's own engine arguments under `actors.engine=vllm`, e.g. `actors.vllm.tensor_parallel_size=2`."""
    actor_id: str | None = None
    """Stable name of this actor; null makes one from the host and a random part."""
    allow: list[str] = field(default_factory=list)
    """Code, secrets and addresses that a hub, or a run or bundle of somebody else, may name: package.module:attribute,
    file, environment variable, URL."""
    give_up_after_s: SecondsOrZero = 0.0
    """Exit after this long without a hub; 0 retries without limit."""
    transports: list[str] = field(default_factory=lambda: ["auto"])
    """Weight transports this actor may use, best first; your own as package.module:attribute. auto is as in
    `publish.transports`; an actor of its own adds those that its GPU can use."""
    relay: str | None = None
    """A `streamrl relay` that this actor pulls weights from, tcp://HOST:PORT; the learner if it does not answer."""
    key: str | None = None
    """File with this actor's key, as `streamrl keys add` writes it, for a hub with `hub.keys`; null has none."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    share_weights: bool = True
    """Leave pulled weights in shared memory for the other actors of this host, and take what they left."""


@dataclass
class HubConfig:
    bind: str = "tcp://127.0.0.1:0"
    """Where the hub listens; port 0 takes a free one, which is printed and written to `hub.json`."""
    weights_port: Count = 0
    """Port of the weight socket, on the same address; 0 takes a free one. Fix it to reach it through a tunnel."""
    keys: str | None = None
    """Directory of `streamrl keys new`: only actors whose keys are in it may connect, encrypted; null asks for none."""
    advertise: str | None = None
    """Host name or address that actors should use for the weight socket, or the network interface that has it, such as
    eth0; null is the bind address."""
    heartbeat_s: Seconds = 1.0
    """Interval of the heartbeats of both sides."""
    dead_after_s: Seconds = 5.0
    """An actor without a message for this long loses its leases to others."""
    lease_ttl_s: Seconds = 600.0
    """A lease without progress for this long goes to another actor."""
    num_max_attempts: PositiveInt = 3
    """A group that failed this often is dropped."""
    group_deadline_s: SecondsOrZero = 0.0
    """Incomplete groups older than this follow `rollout.group_policy`; 0 never."""


@dataclass
class TrustConfig:
    outlier_errors: NonNegative = 8.0
    """An actor whose rewards, lengths or ratios lie so many standard errors from those of the others (of at least three
    in all) is shut out, and what it delivered is generated again; 0 compares none."""
    audit_share: Share = 0.0
    """Part of the published versions that the learner keeps (a copy in host memory, one at a time) to score what actors
    say they sampled with it; beyond `publish.probe_tolerance`, or for tokens that their seeds do not draw, they are
    shut out. At lag 0 the learner compares anyway."""


@dataclass
class PublishConfig:
    transports: list[str] = field(default_factory=lambda: ["auto"])
    """Weight transports on offer, best first: ipc (inside one GPU) and nccl (broadcast to GPUs) need a GPU here, shm
    reaches this machine, zmq every actor; your own as package.module:attribute. An actor takes the first one that it
    may use and that works for it. auto is shm and zmq, and before them, for the native engine on GPUs, ipc or nccl."""
    nccl_init_deadline_s: Seconds = 20.0
    """Time for all members to build a communicator; a member that is late is left out and pulls."""
    nccl_bucket_deadline_s: Seconds = 10.0
    """Time for one bucket to reach every member by broadcast or IPC buffer; after it the broadcast is aborted."""
    dtype: WireDtype = WireDtype.auto
    """Type in which weights are sent; auto is float32 on a CPU and bfloat16 on a GPU. Buffers keep their own."""
    bucket_bytes: PositiveInt = 16 << 20
    """Size of a digest and transfer unit."""
    num_keep_versions: PositiveInt = 2
    """Published versions that stay available."""
    max_bytes_per_s: Count = 0
    """Cap of the hub's bandwidth for pulled weights; 0 is none."""
    delta_max_ratio: Share = 0.25
    """Actors that pull get just what changed since the version they hold, if at most this part of all; 0 never."""
    when: PublishWhen = PublishWhen.every_step
    """Publish after every step; after every_optimizer_step of a batch that takes several; or only once the predicted
    drift since the last one exceeds a quarter of `staleness.adaptive.m2_target` (before the actors' lead runs out)."""
    every_steps: PositiveInt = 1
    """Publish after every so many steps (batches) under `publish.when=every_step`: less traffic, older data. At most
    `staleness.eta` + 1, because actors without a newer version may run no further ahead."""
    beside_training: BesideTraining = BesideTraining.auto
    """Train on while a version is written, from a copy on the device (2 bytes a parameter, over all ranks): `always`,
    `never`, or `auto` on a GPU. The first version, and those of ranks on several hosts, are waited for."""
    probe_every: Count = 20
    """Every so many versions, and at a learner's first, actors must score fixed tokens as the learner does; 0 never.
    Under `launch.share_gpus=turns` at every version."""
    probe_tolerance: Positive | None = None
    """Largest mean difference of those log-probs, in nats; an actor beyond it gets no leases until it passes again.
    Null is 0.1, and 0.5 under `actors.weights=int8`, whose rounding alone may differ by 0.2."""


@dataclass
class CheckpointConfig:
    every_minutes: NonNegative = 10.0
    """Save once this much time has passed since the last one, and at the end; 0 never for the time. A run that is
    killed trains what lies between again, from its log."""
    every_steps: Count = 0
    """Save after every so many steps too; 0 never for their number."""
    beside_training: BesideTraining = BesideTraining.auto
    """Train on while a checkpoint is written, from a copy in host memory (12 bytes a parameter, over all ranks):
    `always`, `never`, or `auto` on a GPU."""
    resume: bool = False
    """Continue from the newest good checkpoint of this run directory (or of the newest run of this name)."""
    directory: str | None = None
    """Another folder for checkpoints, such as one on a larger disk, in which the run gets a folder by its run_id; the
    run directory links to them. null keeps them in the run directory."""
    num_keep: PositiveInt = 2
    """Checkpoints that are kept."""
    grace_s: SecondsOrZero = 300.0
    """Seconds for which checkpoints may fail, as on a full disk, before the run ends; tried again after 1, 2, 4 ..."""
    export_hf: bool = True
    """When the steps are done, also write the policy as an ordinary Hugging Face checkpoint, in model/ of the run
    directory, which `policy.model_path` may name; and a critic in critic/, for `critic.model_path`."""


@dataclass
class StreamConfig:
    fsync: StreamFsync = StreamFsync.interval
    """When the run's log goes to the disk: `interval`, every 50 ms; `always`, each record at once; `never` leaves it to
    the operating system, whose crash then loses what actors no longer hold."""
    keep: StreamKeep = StreamKeep.all
    """`all` keeps the log, up to stream.max_gb, for replays; `recovery` only what the newest checkpoints need."""
    max_gb: Positive = 20.0
    """Size of the log beyond which its oldest files go, if no checkpoint that is kept needs them."""
    keep_refused: bool = False
    """The log also keeps the answers that were refused for their age, not just their digests."""


@dataclass
class SamplesConfig:
    num_per_step: Count = 4
    """Trajectories of each step that samples.jsonl keeps, each of another group, drawn at random; 0 keeps none."""
    num_per_eval: Count = 8
    """Transcripts of each evaluation that samples.jsonl keeps, always of the same prompts; 0 keeps none."""
    echo_every_steps: Count = 25
    """Print one of them in the learner's log at the first step and after every so many, cut to a line; 0 never."""
    num_detailed_tokens: Count = 512
    """Leading tokens of a sample that are also kept one by one, with their ids, versions and importance ratios."""
    max_bytes: PositiveInt = 64 << 20
    """Size at which samples.jsonl is thinned: every second of the steps in it leaves it, and fewer are written."""


@dataclass
class WandbConfig:
    enabled: bool = False
    """Also log to Weights & Biases, as `tracking.trackers=[wandb]` does."""
    mode: WandbMode = WandbMode.offline
    """offline writes locally, online talks to the service."""


@dataclass
class TrackingConfig:
    project: str = "streamrl"
    """Project name for trackers."""
    trackers: list[str] = field(default_factory=list)
    """Trackers that get every step beside metrics.jsonl: tensorboard, mlflow, trackio, wandb, or your own factory as
    package.module:attribute."""
    artifacts: bool = False
    """Give wandb, MLflow or your own tracker the trained model, the settings, the summary and the report at the end."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options for your own tracker, which finds them in `TrackedRun.settings`, e.g. `tracking.options.url=...`."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""


TURNS = "turns"
"""The value of `launch.share_gpus` for turns."""


@dataclass
class LaunchConfig:
    num_actors: Count = 2
    """Actors that `streamrl launch` starts and keeps alive."""
    num_learner_ranks: PositiveInt = 1
    """Learner processes (FSDP2 ranks) that `streamrl launch` starts through torchrun."""
    gpus_per_actor: PositiveInt | None = None
    """GPUs of each actor that launch starts, after those of the learner; null is as many as its engine needs: one, or
    the tensor-parallel times the pipeline-parallel size of vLLM."""
    share_gpus: bool | str | None = None
    """Whether processes of the run may share GPUs where there are too few: true or false; null: where no device is
    set to cuda. `turns`: actors give their engines' memory back while the learner trains, for a model that does not
    fit beside its learner."""
    num_max_restarts: Count = 20
    """Restarts of an actor before launch gives up on it; two minutes of health set the count back."""
    num_max_learner_restarts: Count = 3
    """Restarts, from its newest checkpoint, of a learner that was killed or whose ranks lost each other, before launch
    gives up; a newer version sets the count back. A learner that fails by itself is not restarted."""
    standby_learner: bool = False
    """Keep a second learner process, with its libraries loaded, that takes over when the only rank is killed: some
    seconds sooner, for about 0.5 GB of memory."""
    in_process: bool = False
    """Run learner, hub and one actor with the native engine as threads of one process, on the CPU: for debuggers."""
    debug: bool = False
    """For `launch.in_process`, set by `streamrl debug`: environments and rewards are called in the main thread,
    where breakpoint() stands, without a time limit or a check before the run; what they raise opens the debugger."""

    @property
    def by_turns(self) -> bool:
        """Tell whether actors and learner take turns with the memory of their GPUs."""
        return self.share_gpus == TURNS


@dataclass
class SweepConfig:
    dir: str | None = None
    """Directory of a sweep, with one directory for each run; null is `<run.root>/sweep-<date>-<time>`."""
    subdir: str | None = None
    """Name of each run's directory there, with {num} for its number and {overrides} for what varies; null has both."""
    sampler: str = "grid"
    """Which runs `streamrl launch -m` does: grid takes every combination of the listed values; tpe and random draw
    `sweep.num_trials` of them, from ranges too (needs Optuna); or your own factory as package.module:attribute."""
    num_grid_points: Annotated[int, Meta(ge=2)] | None = None
    """Values of an interval that a grid tries, its ends among them; with tag(log,...) evenly by order of magnitude.
    Null refuses an interval in a grid."""
    num_trials: PositiveInt = 20
    """Runs of a search; a grid does them all."""
    num_startup_trials: Count = 5
    """The first so many trials are drawn at random, and only after as many finished ones are others pruned."""
    metric: str = "eval_score_last"
    """What a run is ranked by: a number of summary.json, such as eval_score_last or eval_score_best, or the last value
    of a metric, such as reward/mean."""
    direction: SweepDirection = SweepDirection.maximize
    """Whether a large or a small value of `sweep.metric` is good."""
    pruner: Pruner = Pruner.median
    """Stop a run of a search whose evaluations fall behind: `median` of the finished ones at the same step, `asha`
    (the best quarter goes on at steps that grow fourfold), or `none`."""
    num_parallel: PositiveInt | None = None
    """Runs of a sweep at once; on this machine they share its cores and GPUs evenly. Null is 1 here, and on Slurm all
    of a grid, or `sweep.num_startup_trials` of a search."""
    launcher: SweepLauncher = SweepLauncher.local
    """Starter of a sweep's runs: `local` is the sweep itself; the package submitit makes each a job of Slurm
    (submitit_slurm) or of this machine (submitit_local), which outlives the sweep and is found by a resumed one."""
    launcher_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of submitit under `sweep.launcher`, such as timeout_min, partition, cpus_per_task, gpus_per_node and
    setup; max_num_timeout: how often a job whose time was over, or that was lost, is queued again (3)."""
