"""Networks and their optimizers: the policy, the critic."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.config.sections.choices import CriticKind, EssRule


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
