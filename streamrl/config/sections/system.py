"""The machinery: learner, actors, hub, weights, checkpoints, trackers, launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamrl.config.sections.choices import Engine, OnInstall, PublishWhen, WandbMode, WireDtype


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
    export_hf: bool = True
    """When the steps are done, also write the policy as an ordinary Hugging Face checkpoint, in model/ of the run
    directory; `policy.model_path` may name it."""


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
