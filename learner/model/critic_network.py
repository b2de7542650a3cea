"""The critic's networks, and how one is put together from the settings.

    ValueHead     hidden states of the policy -> values               (critic.kind=head)
    CriticModel   packed tokens -> its own transformer -> ValueHead   (critic.kind=model)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from learner.checkpoint.model_files import ModelFiles
from learner.data.layout import PackedLayout
from learner.model.attention.packed import decoder_of, packed_states, registered
from learner.model.critic import Critic
from learner.model.optimizer import make_optimizer, make_schedule
from learner.model.policy import Policy, load_policy, shard
from learner.ranks.mesh import Ranks
from streamrl.algorithms import find_estimator
from streamrl.config.schema import CriticConfig, CriticKind
from streamrl.errors import ConfigError

_LARGEST_ACTION_HEAD = 4096
VALUE_HEAD = "value_head.safetensors"
"""In the folder of a critic: its value head, and as `targets` the moments of what it learned."""


class ValueHead(nn.Module):
    """Two layers on normalized hidden states, or of a critic that starts at a reward model that one's single layer.

    The last layer starts at 0, so that all values begin alike.
    """

    shares_prompts = True  # it reads the policy's states

    def __init__(self, hidden_size: int, num_outputs: int = 1, *, single_layer: bool = False) -> None:
        super().__init__()
        self.norm = None if single_layer else nn.LayerNorm(hidden_size)
        self.inner = None if single_layer else nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, num_outputs)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    @property
    def output_layer(self) -> nn.Module:
        return self.outer

    def forward(self, states: Tensor) -> Tensor:
        """[K, H] to [K, num_outputs]."""
        states = states.to(self.outer.weight.dtype)
        if self.norm is not None and self.inner is not None:
            states = nn.functional.silu(self.inner(self.norm(states)))
        return self.outer(states)


class CriticModel(nn.Module):
    """A decoder of its own with a value head on it."""

    def __init__(self, decoder: nn.Module, head: ValueHead, *, shares_prompts: bool = False) -> None:
        """`shares_prompts`: as of a `Policy`."""
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.shares_prompts = shares_prompts

    def forward(self, tokens: Tensor, positions: Tensor, packing: PackedLayout, state_index: Tensor) -> Tensor:
        """Values of the states at `state_index` [K] of the packed row [N]; [K, num_outputs]."""
        hidden = packed_states(self.decoder, tokens, positions, packing)
        return self.head(hidden.index_select(0, state_index))


def saved_head(config: CriticConfig) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of the value head that critic.model_path holds, none without one, and the moments of its targets.

    A reward model's scores are values of mean 0 and scale 1. Raises ConfigError: a critic of the other kind, or none.
    """
    nothing_seen = torch.zeros(3, dtype=torch.float64)
    if config.model_path is None:
        return {}, nothing_seen
    folder = Path(config.model_path)
    if (folder / VALUE_HEAD).is_file():
        trained = "model" if any(path.name != VALUE_HEAD for path in folder.glob("*.safetensors")) else "head"
        if trained != config.kind.name:
            raise ConfigError(f"critic.model_path={folder} was trained with critic.kind={trained}: set it so")
        tensors = load_file(folder / VALUE_HEAD)
        return tensors, tensors.pop("targets")
    if config.kind is CriticKind.head:
        raise ConfigError(
            f"critic.model_path={folder} holds no {VALUE_HEAD}, and critic.kind=head reads nothing else: give "
            "RUN/critic of another run, or set critic.kind=model"
        )
    score = ModelFiles(folder).tensor("score.weight")
    if score is None:
        return {}, nothing_seen
    one_batch = torch.tensor([0.01, 0.0, 0.01], dtype=torch.float64)  # their weight: soon they are those of the run
    return {"outer.weight": score.float(), "outer.bias": torch.zeros(len(score))}, one_batch


def make_head(tensors: Mapping[str, Tensor], hidden_size: int, num_outputs: int) -> ValueHead:
    """A value head with the tensors of a saved one, or a new one without. Raises ConfigError: another size."""
    head = ValueHead(hidden_size, num_outputs, single_layer=bool(tensors) and "inner.weight" not in tensors)
    if tensors:
        size = tuple(tensors["outer.weight"].shape)
        if size != tuple(head.outer.weight.shape):
            raise ConfigError(
                f"critic.model_path has a value head of {size[0]} outputs for states of size {size[1]}; this critic "
                f"needs {num_outputs} for {hidden_size}: take that of a run with this policy and estimator"
            )
        head.load_state_dict(dict(tensors))
    return head


def build_critic(
    config: CriticConfig, estimator: str, policy: Policy, model_dir: Path, *, num_steps: int, dtype: torch.dtype,
    ranks: Ranks, max_tokens: int | None = None,
) -> Critic:
    """The critic that the settings describe.

    Args:
        estimator: name; one that reads action values (`retrace_q`) makes it a critic of these.
        model_dir: the policy's first checkpoint; a critic model starts there unless critic.model_path is set, which
            may also be a critic or a reward model, whose head it then starts with.
        num_steps: of the run, for the schedule.
        max_tokens: of the run's longest sequence; see `load_policy`.
    Raises:
        ConfigError: action values over a large vocabulary, or action values without the policy's states.
    """
    of_actions = find_estimator(estimator).of_actions
    vocabulary = policy.vocab_size
    if of_actions and vocabulary > _LARGEST_ACTION_HEAD:
        raise ConfigError(
            f"advantage.estimator={estimator!r} gives every token of the vocabulary a value; with {vocabulary} tokens "
            f"(most {_LARGEST_ACTION_HEAD}) that head would be larger than the model: use retrace_v or vtrace."
        )
    if of_actions and config.kind is not CriticKind.head:
        raise ConfigError(f"advantage.estimator={estimator!r} reads the policy's distribution: set critic.kind=head.")
    outputs = 1 + vocabulary if of_actions else 1
    tensors, moments = saved_head(config)
    if config.kind is CriticKind.head:
        head = make_head(tensors, policy.hidden_size, outputs)
        module: nn.Module = shard(head, [], ranks, torch.float32)
    else:
        module = _critic_model(
            Path(config.model_path or model_dir), lambda size: make_head(tensors, size, outputs), policy, ranks, dtype,
            max_tokens=max_tokens,
        )
        head = module.head
    return Critic(
        module, head.outer, make_optimizer(module, config.optimizer, setting="critic.optimizer"),
        make_schedule(config.optimizer, config.scheduler, num_steps=num_steps, setting="critic.scheduler"),
        ranks=ranks, reads_policy=config.kind is CriticKind.head, of_actions=of_actions, clip=config.clip,
        num_steps=config.num_steps, max_grad_norm=config.optimizer.max_grad_norm, moments=moments,
    )


def _critic_model(
    model_dir: Path, head_of: Callable[[int], ValueHead], policy: Policy, ranks: Ranks, dtype: torch.dtype, *,
    max_tokens: int | None,
) -> CriticModel:
    """The decoder of a checkpoint, of which each rank reads the rows of its shards, with a value head on it."""
    made: list[CriticModel] = []

    def around(start: Policy) -> CriticModel:
        start.model.set_attn_implementation(registered(policy.attention))
        made.append(CriticModel(
            decoder_of(start.model), head_of(start.hidden_size), shares_prompts=start.shares_prompts
        ))
        return made[0]

    # Without a mesh nothing is sharded, and the type of a policy's passes would be refused.
    start = load_policy(
        model_dir, max_tokens=max_tokens, share_prompts=policy.shares_prompts, ranks=ranks, around=around,
        dtype=dtype if ranks.fsdp_mesh is not None else torch.float32,
    )
    return made[0] if made else around(start)
