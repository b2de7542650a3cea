"""A small model of any architecture: same code and rules, tiny sizes, windows and original lengths of a few tokens.

What an architecture does beyond its window or beyond its original length shows in rows of forty tokens then, on any
model in milliseconds. The self-checks of learner and engine use it, and so does the table in docs/models.md.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from streamrl.architectures.rope import original_length

log = logging.getLogger(__name__)

WINDOW, ORIGINAL_LENGTH, MAX_LENGTH = 8, 16, 64
ROWS = (41, 13, 29)
"""Lengths of the rows of a check: beyond the window, beyond and within the original length."""

HEAD_DIM = 8
_HEADS = 4
_VOCABULARY = 96
_EXPERTS = 4
_MOST_PARAMETERS = 2_000_000

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"),
                    _HEADS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), _VOCABULARY),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
                    _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "experts_per_token", "top_k_experts",
                     "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts",
                     "moe_num_shared_experts", "num_expert_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
                     "max_target_positions"), MAX_LENGTH),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size",
                     "window_size", "chunk_size"), WINDOW),
    **dict.fromkeys(("index_topk", "keep_window_size"), WINDOW),
}
_IN_HEAD_DIMS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), _HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "attention_head_dim", "d_kv",
                     "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "swa_v_head_dim", "index_head_dim",
                     "rotary_dim"), 1),
    **dict.fromkeys(("qk_head_dim",), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "intermediate_size", "ffn_dim", "n_inner", "d_ff",
                     "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "moe_intermediate_size",
                     "shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp",
                     "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "expert_intermediate_size",
                     "moe_shared_intermediate_size", "moe_latent_size", "dense_intermediate_size"), 2),
}
_KEY_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "swa_num_key_value_heads", "multi_query_group_num",
              "num_global_key_value_heads", "index_n_heads", "swa_num_attention_heads")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads")


class ConfigKey:
    """A model's configuration as a key, equal to another of the same class and text.

    What depends on the architecture alone is checked once in a process.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.name = type(config).__name__.removesuffix("Config")
        self._text = f"{self.name} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigKey) and self._text == other._text


def miniature_config(config: Any, *, head_dim: int = HEAD_DIM) -> Any:
    """A copy of a configuration and its parts in tiny sizes; its kinds of layers, rules and options are kept."""
    values = config.to_dict()
    sizes = _SIZES | {name: count * head_dim for name, count in _IN_HEAD_DIMS.items()}
    _shrink_layers(values)
    _shrink_sizes(values, sizes)
    for own in (values.get("per_layer_config") or {}).values():
        _shrink_sizes(own, sizes)
    _shrink_rope(values, head_dim)
    small = type(config).from_dict(values)
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(small, name, None)) is not None:
            setattr(small, name, miniature_config(part, head_dim=head_dim))
    return small


def _shrink_sizes(values: dict[str, Any], sizes: dict[str, int]) -> None:
    old_heads = next((values[name] for name in _HEAD_COUNTS if isinstance(values.get(name), int)), None)
    for name in _KEY_HEADS:
        if _is_size(values.get(name)):
            values[name] = _HEADS if values[name] == old_heads else min(2, values[name])
    for name, size in sizes.items():
        value = values.get(name)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            values[name] = [size if one else one for one in value]
        elif _is_size(value):
            values[name] = size
    for name in [name for name in values if name.endswith("_token_id")]:
        if isinstance(values[name], list) or (_is_size(values[name]) and values[name] >= _VOCABULARY):
            values[name] = 1


def first_layers(config: Any) -> Any:
    """A copy of a text configuration with its first layers alone, as many as show every kind; at least two."""
    values = config.to_dict()
    _shrink_layers(values, prefix=True)
    return type(config).from_dict(values)


def build_miniature(config: Any, *, seed: int = 0, head_dim: int = HEAD_DIM) -> torch.nn.Module:
    """A causal language model from `miniature_config(config)`, float32 on the CPU, random weights, evaluation mode.

    Of a model that also reads images or sounds it is a copy of the whole, or if none can be made of its text part. The
    weights are larger than at the start of a training, so that attention is not nearly uniform. The global random
    generator is left as it was. Raises ValueError, or what foreign code raises, where no small copy can be made.
    """
    text = config.get_text_config(decoder=True)
    if text is not config:
        try:
            return _build(miniature_config(config, head_dim=head_dim), seed)
        except Exception as error:  # foreign code on sizes that it never saw
            log.debug("no small copy of all of %s: %s", type(config).__name__, error)
    return _build(miniature_config(text, head_dim=head_dim), seed)


def _build(small: Any, seed: int) -> torch.nn.Module:

    def build() -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"its small copy still has {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def check_rows(vocabulary: int, lengths: tuple[int, ...] = ROWS) -> list[torch.Tensor]:
    """Token ids of the rows of a check, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def rows_for(config: Any, *, long: bool) -> tuple[tuple[int, ...], int | None]:
    """Lengths of the rows of a check of a miniature, and the longest sequence of the run that they stand for.

    Where the frequencies of a rotary embedding change with a row's length, all rows are on one side of the change.
    """
    if (limit := original_length(config)) is None:
        return ROWS, None
    return (ROWS[0], limit + 1, ROWS[2]) if long else (limit, 5, ROWS[1]), MAX_LENGTH if long else limit


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shrink_layers(values: dict[str, Any], *, prefix: bool = False) -> None:
    """Keep one layer of each kind, at least two in all; lists with an entry for each layer are cut alike.

    `prefix`: also those between them, so that every layer keeps its number.
    """
    count = next((values[name] for name in _LAYERS if _is_size(values.get(name))), 0)
    if count <= 2:
        return
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    numbers = {name: value for name, value in lists.items() if _are_layer_numbers(name, value, count)}
    entries = {name: value for name, value in lists.items() if len(value) == count and name not in numbers}
    own = {int(layer): value for layer, value in (values.get("per_layer_config") or {}).items()}
    sharing = values.get("num_kv_shared_layers") or 0
    kinds = [
        (
            layer >= count - sharing, str(own.get(layer)), *(layer in value for value in numbers.values()),
            *(str(value[layer]) for value in entries.values()),
        )
        for layer in range(count)
    ]
    kept = sorted({kinds.index(kind) for kind in kinds} | {0, 1})
    kept = list(range(kept[-1] + 1)) if prefix else kept
    for name in _LAYERS:
        if _is_size(values.get(name)):
            values[name] = len(kept)
    for name, value in entries.items():
        values[name] = [value[layer] for layer in kept]
    for name, value in numbers.items():
        values[name] = [place for place, layer in enumerate(kept) if layer in value]
    if own:
        values["per_layer_config"] = {place: own[layer] for place, layer in enumerate(kept) if layer in own}
    if sharing:
        values["num_kv_shared_layers"] = sum(layer >= count - sharing for layer in kept)


def _are_layer_numbers(name: str, value: list[Any], count: int) -> bool:
    """Whether a list names layers instead of having an entry for each."""
    return (
        name.endswith(("layers", "layer_ids", "idxs", "indices", "idx")) and all(isinstance(one, int) for one in value)
        and all(0 <= one < count for one in value) and len(set(value)) == len(value)
    )


def _shrink_rope(values: dict[str, Any], head_dim: int) -> None:
    found = values.get("rope_parameters") or {}
    for parameters in [found] if "rope_type" in found else [one for one in found.values() if isinstance(one, dict)]:
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = ORIGINAL_LENGTH
        width = int((values.get("head_dim") or head_dim) * parameters.get("partial_rotary_factor", 1.0))
        for name in ("short_factor", "long_factor"):
            if name in parameters:
                parameters[name] = list(parameters[name])[: width // 2]
        if "mrope_section" in parameters:
            parameters["mrope_section"] = [2, 1, 1]
    if _is_size(values.get("original_max_position_embeddings")):
        values["original_max_position_embeddings"] = ORIGINAL_LENGTH
