"""The critic's networks, and how one is put together from the settings.

    ValueHead     hidden states of the policy -> values               (critic.kind=head)
    CriticModel   packed tokens -> its own transformer -> ValueHead   (critic.kind=model)
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from learner.data.layout import PackedLayout
from learner.model.attention.packed import decoder_of, packed_states, registered
from learner.model.critic import Critic
from learner.model.optimizer import make_optimizer, make_schedule
from learner.model.policy import Policy, decoder_layers, load_policy, shard
from learner.ranks.mesh import Ranks
from streamrl.algorithms import find_estimator
from streamrl.config.schema import CriticConfig, CriticKind
from streamrl.errors import ConfigError

_LARGEST_ACTION_HEAD = 4096


class ValueHead(nn.Module):
    """Two layers on normalized hidden states; the last one starts at 0, so that all values begin alike."""

    shares_prompts = True  # it reads the policy's states

    def __init__(self, hidden_size: int, num_outputs: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, num_outputs)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    @property
    def output_layer(self) -> nn.Module:
        return self.outer

    def forward(self, states: Tensor) -> Tensor:
        """[K, H] to [K, num_outputs]."""
        return self.outer(nn.functional.silu(self.inner(self.norm(states.to(self.inner.weight.dtype)))))


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


def build_critic(
    config: CriticConfig, estimator: str, policy: Policy, model_dir: Path, *, num_steps: int, dtype: torch.dtype,
    ranks: Ranks, max_tokens: int | None = None,
) -> Critic:
    """The critic that the settings describe.

    Args:
        estimator: name; one that reads action values (`retrace_q`) makes it a critic of these.
        model_dir: the policy's first checkpoint; a critic model starts there unless critic.model_path is set.
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
    if config.kind is CriticKind.head:
        head = ValueHead(policy.hidden_size, outputs)
        module: nn.Module = shard(head, [], ranks, torch.float32)
    else:
        start = load_policy(
            config.model_path or model_dir, max_tokens=max_tokens, share_prompts=policy.shares_prompts
        )
        start.model.set_attn_implementation(registered(policy.attention))
        head = ValueHead(start.hidden_size, outputs)
        network = CriticModel(decoder_of(start.model), head, shares_prompts=start.shares_prompts)
        module = shard(network, decoder_layers(start.model), ranks, dtype)
    return Critic(
        module, head.outer, make_optimizer(module, config.optimizer, setting="critic.optimizer"),
        make_schedule(config.optimizer, config.scheduler, num_steps=num_steps, setting="critic.scheduler"),
        ranks=ranks, reads_policy=config.kind is CriticKind.head, of_actions=of_actions, clip=config.clip,
        num_steps=config.num_steps, max_grad_norm=config.optimizer.max_grad_norm,
    )
