"""The families: those that transformers registers for causal language models, and a tiny checkpoint of each.

What a family needs beside the defaults of its configuration, to be built or to make its window show, stands here.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from streamrl.architectures.miniature import HEAD_DIM, build_miniature
from streamrl.architectures.refusals import why_refused
from streamrl.architectures.saved_buffers import saved_buffers

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _WINDOW),
    **dict.fromkeys(("phimoe", "starcoder2"), {"sliding_window": 8}),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 8}),
    "deepseek_v2": {**_EXPERTS, "first_k_dense_replace": 1}, "dots1": _EXPERTS,
    "nemotron": {"num_key_value_heads": 8, "head_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
    "deepseek_v3": {"topk_method": "noaux_tc"},  # as in its own files: vLLM reads the router's bias then
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "hrm_text": {"num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 1},
}
"""model_type -> settings."""
FAST = (
    "afmoe", "apertus", "cohere2", "deepseek_v3", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "llama", "mixtral",
    "phi3", "qwen3",
)
"""A dozen that differ most: norms, rotations, windows, sinks, experts, buffers, frozen weights."""
MORE = (
    "bailing_hybrid", "bloom", "cohere", "ernie4_5_moe", "gemma2", "glm4_moe", "gpt_neox", "granite",
    "jamba", "laguna", "llama4_text", "longcat_flash", "minimax_m2", "mistral", "olmo2", "opt", "qwen2", "qwen3_moe",
)
"""Families that make thirty together with `FAST`."""


class NotBuilt(Exception):
    """No tiny model of this family can be made; the text says why."""


def config_of(model_type: str, **more: Any) -> Any:
    """The family's configuration in its own sizes, as `build_miniature` takes it."""
    return CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}) | more)


def refusal(model_type: str) -> str:
    """Why learner and native engine refuse the family, before they build anything; "" if they do not."""
    try:
        config = CONFIG_MAPPING[model_type]()
        built = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception:  # foreign code, whose defaults make no configuration
        config, built = SimpleNamespace(model_type=model_type, get_text_config=lambda **_: config), None
    can_set = built._can_set_attn_implementation if built is not None else lambda: True
    return why_refused(SimpleNamespace(config=config, _can_set_attn_implementation=can_set)) or ""


def save_tiny(
    model_type: str, folder: Path, *, tied: bool, head_dim: int = HEAD_DIM, mixed_windows: bool = True
) -> dict[str, int]:
    """Write a tiny checkpoint, whose saved buffers are not their first values; how many tensors of which kind it has.

    Qwen models have a window in one layer of two, or with `mixed_windows=False` in none, as they come.

    Raises NotBuilt.
    """
    try:
        windows = {} if mixed_windows or SETTINGS.get(model_type) is not _WINDOW else {"use_sliding_window": False}
        config = config_of(model_type, tie_word_embeddings=tied, **windows)
        config.get_text_config(decoder=True).tie_word_embeddings = tied
        model = build_miniature(config, seed=1, head_dim=head_dim)
    except Exception as error:  # foreign code on sizes that it never saw
        raise NotBuilt(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error
    if model.config.model_type != config.model_type:
        raise NotBuilt(f"its text part is `{model.config.model_type}`")
    if (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is not tied:
        raise NotBuilt("it ties its embeddings" if not tied else "it does not tie its embeddings")
    fill_buffers(model)
    model.save_pretrained(folder)
    words = {f"<{number}>": number for number in range(model.get_output_embeddings().weight.shape[0])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>").save_pretrained(folder)
    try:
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of what transformers registers twice
        raise NotBuilt(f"transformers cannot load it again: {error}".partition("\n")[0][:200]) from error
    named = list(model.named_parameters())
    return {
        "buffers": len(list(saved_buffers(model))),
        "untrained": sum(not parameter.requires_grad for _, parameter in named),
    }


def fill_buffers(model: nn.Module) -> None:
    """Give saved buffers other values than they begin with, which 0 mostly is."""
    for place, (_, buffer) in enumerate(saved_buffers(model)):
        buffer.mul_(1.1)
        if buffer.dim():
            buffer.add_(torch.linspace(0.1, 0.3, buffer.numel()).view(buffer.shape) + place / 97)
