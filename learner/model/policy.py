"""The policy: any causal language model of transformers, scored packed, sharded with FSDP2 over several ranks.

Only the model's attention function and output layer are replaced: hidden states go to `score_tokens`, which holds a
chunk of logits at a time. `load_policy` checks on a few tokens that this gives the model's own log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from learner.data.layout import PackedLayout, make_layout
from learner.mesh import Ranks
from learner.model.attention import ATTENTION
from learner.model.logprob_head import inspect_tokens, score_tokens
from streamrl.errors import ConfigError

_MOST_DIFFERENCE = 1e-3  # of a log-prob, in float32, between packed and plain scoring; measured about 1e-6


@dataclass(frozen=True, slots=True)
class Inspect:
    """What a scoring pass returns beside log-probs and entropies."""

    state_index: Tensor  # int64 [K] packed positions whose hidden states are wanted
    square_sums: bool = False  # the sum of squared probabilities of every scored token's distribution
    all_logprobs: bool = False  # the whole distribution of every scored token; for small vocabularies


@dataclass(frozen=True, slots=True, eq=False)
class Inspected:
    """Everything that a pass with `Inspect` returns."""

    logprobs: Tensor  # [M]
    entropy: Tensor  # [M]
    states: Tensor  # [K, H]
    square_sums: Tensor | None  # [M]
    all_logprobs: Tensor | None  # [M, V]


class Policy(nn.Module):
    """A causal language model that scores packed sequences; `policy.model` is the transformers model, names and all."""

    def __init__(self, model: Any, *, chunk_tokens: int = 1024) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        tokens: Tensor,  # int64 [N] sequences end to end
        positions: Tensor,  # int64 [N] from 0 in each sequence
        packing: PackedLayout,
        score_index: Tensor,  # int64 [M] packed position whose hidden state predicts the scored token
        targets: Tensor,  # int64 [M] the scored tokens
        temperatures: Tensor,  # [M]
        inspect: Inspect | None = None,
    ) -> tuple[Tensor, Tensor] | Inspected:
        """Log-prob of each target and entropy of the distribution it was drawn from; [M] each, nats, float32.

        With `inspect` the answer is an `Inspected`: it is one pass, as FSDP2 gathers weights for `forward` only.
        """
        hidden = self.model.get_decoder()(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, packing=packing
        ).last_hidden_state[0]
        head = self.output_layer
        read, bias = hidden.index_select(0, score_index), getattr(head, "bias", None)
        logprobs, entropy = score_tokens(
            read, head.weight, targets, temperatures, bias=bias, chunk_tokens=self.chunk_tokens
        )
        if inspect is None:
            return logprobs, entropy
        squares = everything = None
        if inspect.square_sums or inspect.all_logprobs:
            squares, everything = inspect_tokens(
                read, head.weight, temperatures, bias=bias, chunk_tokens=self.chunk_tokens,
                keep_all=inspect.all_logprobs,
            )
        return Inspected(logprobs, entropy, hidden.index_select(0, inspect.state_index), squares, everything)

    @property
    def output_layer(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)


def load_policy(
    model_dir: Path | str, *, dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False,
    chunk_tokens: int = 1024, ranks: Ranks | None = None,
) -> Policy:
    """A policy from a local checkpoint, ready to train.

    Every rank reads the checkpoint into host memory in float32, then keeps its shard.

    Args:
        model_dir: a Hugging Face checkpoint directory; nothing is fetched and no code of it is run.
        dtype: of the computation. Master weights, gradients and moments are float32; bfloat16 goes through FSDP2's
            mixed precision, so `ranks` must have a mesh.
        gradient_checkpointing: recompute each layer's activations in the backward pass.
        chunk_tokens: tokens whose logits exist at once.
    Raises:
        ConfigError: no such directory, or a model whose packed log-probs would not be its own.
    """
    ranks = ranks or Ranks()
    model = _read_model(Path(model_dir))
    policy = Policy(model, chunk_tokens=chunk_tokens).train()
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a dropped unit would change the ratio that is being trained on
    _check_scoring(policy, str(model_dir))
    if gradient_checkpointing:
        # transformers renamed it in 5.23; both names take the keyword arguments of torch's checkpoint
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if ranks.fsdp_mesh is None:
        if dtype != torch.float32:
            raise ConfigError(f"policy.dtype={dtype} goes through FSDP2: start the ranks with sharded=True.")
        return policy.to(ranks.device)
    return shard(policy, decoder_layers(policy.model), ranks, dtype)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The units of sharding: what the architecture declares indivisible (its decoder layers)."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def _read_model(model_dir: Path) -> Any:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"policy.model_path={model_dir}: no config.json there; give a local Hugging Face checkpoint.")
    transformers_logging.disable_progress_bar()  # one bar per rank, over the log, for a load of a second
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=ATTENTION,
            local_files_only=True, trust_remote_code=False,
        )
    except (ValueError, KeyError) as error:
        raise ConfigError(f"policy.model_path={model_dir} cannot be loaded for packed scoring: {error}") from error


def shard(module: nn.Module, layers: Sequence[nn.Module], ranks: Ranks, dtype: torch.dtype) -> Any:
    """FSDP2: a unit per layer; the root holds embeddings, final norm and head, so its hook gathers them.

    Without a mesh the module merely moves to the ranks' device.
    """
    if ranks.fsdp_mesh is not None:
        precision = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer in layers:
            fully_shard(layer, mesh=ranks.fsdp_mesh, mp_policy=precision)
        fully_shard(module, mesh=ranks.fsdp_mesh, mp_policy=precision)
    return module.to(ranks.device)


@torch.no_grad()
def _check_scoring(policy: Policy, where: str) -> None:
    """Score two short rows packed, and each alone with the model's own output layer; they must agree.

    Catches models that scale or cap their logits, mix neighbors through a recurrence, or ignore the packing.
    """
    config = policy.model.config.get_text_config()
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None):
            raise ConfigError(f"{where}: {name}={getattr(config, name)}, but packed scoring has no soft cap.")
    vocabulary = policy.output_layer.weight.shape[0]
    rows = [row.remainder(vocabulary) for row in (torch.arange(7), torch.arange(5) * 3 + 1)]
    lengths = [len(row) for row in rows]
    positions = [torch.arange(length) for length in lengths]
    expected = []
    for row, position in zip(rows, positions, strict=True):
        logits = policy.model(
            input_ids=row[None], position_ids=position[None], use_cache=False, packing=make_layout([len(row)])
        ).logits[0].float()
        expected.append(logits[:-1].log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1))
    targets = torch.cat([row[1:] for row in rows])
    index = torch.cat([positions[0][:-1], positions[1][:-1] + lengths[0]])
    scored, _ = policy(
        torch.cat(rows), torch.cat(positions), make_layout(lengths), index, targets, torch.ones(len(targets))
    )
    difference = float((scored - torch.cat(expected)).abs().max())
    if not difference <= _MOST_DIFFERENCE:
        raise ConfigError(
            f"{where}: packed log-probs differ from the model's own by {difference:.2g} nats (most allowed "
            f"{_MOST_DIFFERENCE}): this architecture scales its logits or mixes packed neighbors; it is not supported."
        )
