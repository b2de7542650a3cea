"""A decoder with a scalar head, and its form as `AutoModelForSequenceClassification`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from learner.data.layout import PackedLayout
from learner.model.attention.packed import decoder_of, packed_states, registered
from learner.model.parameters import policy_tensors, travels_as
from learner.model.policy import decoder_layers, load_policy, shard
from learner.publish.export import set_chat_template
from learner.ranks.mesh import Ranks
from streamrl.config.schema import LearnerConfig
from streamrl.errors import ConfigError


class RewardNetwork(nn.Module):
    """Maps packed tokens to a score of each state that is asked for."""

    def __init__(self, decoder: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def forward(self, tokens: Tensor, positions: Tensor, packing: PackedLayout, index: Tensor) -> Tensor:
        """Scores of the states at `index` [M] of the packed row [N]; [M] in float32."""
        states = packed_states(self.decoder, tokens, positions, packing).index_select(0, index)
        return self.score(states.to(self.score.weight.dtype))[:, 0].float()


def load_reward_network(
    model_dir: Path, learner: LearnerConfig, ranks: Ranks, *, dtype: torch.dtype, gradient_checkpointing: bool
) -> RewardNetwork:
    """The decoder of a causal language model with a head that gives every text the score 0; a collective call.

    Raises ConfigError: transformers has no sequence classifier of this architecture to export it as.
    """
    try:
        _empty_classifier(model_dir)
    except ValueError as error:
        raise ConfigError(
            f"policy.model_path={model_dir} cannot become a reward model: transformers has no sequence classifier of "
            "its architecture; take a Llama, Qwen, Mistral or Gemma model"
        ) from error
    start = load_policy(
        model_dir, max_tokens=learner.max_row_tokens, attention=learner.attention.name,
        gradient_checkpointing=gradient_checkpointing,
    )
    start.model.set_attn_implementation(registered(start.attention))
    network = RewardNetwork(decoder_of(start.model), start.hidden_size)
    return shard(network, decoder_layers(start.model), ranks, dtype)


def _empty_classifier(model_dir: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False, num_labels=1)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)


@torch.no_grad()
def export_reward_model(
    network: RewardNetwork, model_dir: Path, out_dir: Path, ranks: Ranks, *, padding: int,
    chat_template: str | None = None,
) -> Path:
    """Write it with its tokenizer as a sequence classifier of one label; a collective call.

    Args:
        padding: the token that batches are padded with.
        chat_template: as of `learner.publish.export.export_model`.
    """
    weights = {}
    for name, tensor in policy_tensors(network):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if ranks.rank == 0:
            weights[name] = whole.detach().to("cpu", travels_as(tensor, torch.float32), copy=True)
    if ranks.rank == 0:
        model = _empty_classifier(model_dir)
        prefix = model.base_model_prefix
        weights = {name.replace("decoder.", f"{prefix}.", 1): one for name, one in weights.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        empty = [name for name, tensor in policy_tensors(model) if tensor.is_meta]
        if empty:
            raise ConfigError(f"the reward model lacks {', '.join(empty[:3])}: take a model of another architecture")
        model.config.pad_token_id = padding
        model.save_pretrained(out_dir, state_dict=weights)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(out_dir)
        set_chat_template(out_dir, chat_template)
    ranks.barrier()
    return out_dir
