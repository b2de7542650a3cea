"""Every setting: its name, type, default and one sentence. YAML in `configs/` only composes these.

Names follow one grammar: `num_` counts, `_s` seconds, `_bytes` and `_tokens` sizes. Choices are enums with lower-case
members. Rules between settings live in `streamrl.config.rules`. The sections stand in `streamrl.config.sections`; this
module puts them together and is where everybody imports them from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.config.sections.algorithm import (
    AdaptiveConfig,
    AdvantageConfig,
    ConstraintConfig,
    EntropyConfig,
    FilterConfig,
    KlConfig,
    LossConfig,
    ObjectivesConfig,
    OverlongConfig,
    ReferenceConfig,
    StalenessConfig,
)
from streamrl.config.sections.choices import (
    AdaptiveRule,
    ConstraintMethod,
    CriticKind,
    Discount,
    Engine,
    EntropyAdapt,
    EssRule,
    GroupPolicy,
    OnEnvError,
    OnInstall,
    OnStale,
    OpsmWhen,
    PublishWhen,
    Segment,
    StalenessMode,
    VetoStat,
    WandbMode,
    WireDtype,
)
from streamrl.config.sections.model import CriticConfig, OptimizerConfig, PolicyConfig, SchedulerConfig, TinyModelConfig
from streamrl.config.sections.system import (
    ActorsConfig,
    CheckpointConfig,
    HubConfig,
    LaunchConfig,
    LearnerConfig,
    PublishConfig,
    TrackingConfig,
    WandbConfig,
)
from streamrl.config.sections.task import (
    DataConfig,
    EnvConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SplitConfig,
    TrainerConfig,
)

__all__ = [
    "ActorsConfig",
    "AdaptiveConfig",
    "AdaptiveRule",
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "ConstraintConfig",
    "ConstraintMethod",
    "CriticConfig",
    "CriticKind",
    "DataConfig",
    "Discount",
    "Engine",
    "EntropyAdapt",
    "EntropyConfig",
    "EnvConfig",
    "EssRule",
    "EvalConfig",
    "FilterConfig",
    "GroupPolicy",
    "HubConfig",
    "KlConfig",
    "LaunchConfig",
    "LearnerConfig",
    "LossConfig",
    "ObjectivesConfig",
    "OnEnvError",
    "OnInstall",
    "OnStale",
    "OpsmWhen",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyConfig",
    "PublishConfig",
    "PublishWhen",
    "ReferenceConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "Segment",
    "SplitConfig",
    "StalenessConfig",
    "StalenessMode",
    "TinyModelConfig",
    "TrackingConfig",
    "TrainerConfig",
    "VetoStat",
    "WandbConfig",
    "WandbMode",
    "WireDtype",
]


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
