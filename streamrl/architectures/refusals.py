"""Architectures that neither packed rows nor the native engine can compute, by name and with a way out."""

from __future__ import annotations

from typing import Any

_RECURRENT = (
    "has recurrent layers: their state would run from one packed row into the next, and the native engine's cache does "
    "not hold it"
)
_ENCODER = "is an encoder: its tokens see later ones"
_ENCODER_DECODER = "is an encoder-decoder: its tokens see another sequence"
_OWN_ATTENTION = "computes attention in code of its own, which knows neither packed rows nor the engine's cache"
_CHOSEN_KEYS = "chooses the keys of each query by scores over the whole pass, packed rows and all"
_BIASED = "adds a learned bias of positions to its attention scores"
_BYTES = "makes tokens out of bytes inside the model, so it has no log-probs of the tokens that an actor sampled"
_DRAFTS = "drafts tokens for another model, whose cache it reads"
_BLOCKS = "lets the tokens of an image see each other by their places in a pass, which packing and the cache change"
_INSTEAD = "take a model of a family that docs/models.md lists as exact"

REFUSED: dict[str, str] = {
    **dict.fromkeys((
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl",
        "xlnet", "xmod", "reformer",
    ), _ENCODER),
    **dict.fromkeys((
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen", "musicgen_melody",
        "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper",
    ), _ENCODER_DECODER),
    **dict.fromkeys((
        "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba2",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
    ), _RECURRENT),
    **dict.fromkeys(
        (
            "axk2", "deepseek_v32", "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4",
            "qwen4_exp", "qwen4_exp_text",
        ),
        _CHOSEN_KEYS,
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    "gemma4_unified": _BLOCKS,
    "git": _OWN_ATTENTION,
    **dict.fromkeys(("inkling_text", "inkling2_text"), _BIASED),
    "blt": _BYTES,
}
"""model_type -> why."""

_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "gated_deltanet", "lightning")


def why_refused(model: Any) -> str | None:
    """A sentence about a model of transformers that cannot be right, or None."""
    config = model.config
    text = config.get_text_config(decoder=True)
    for model_type in (config.model_type, text.model_type):
        if model_type in REFUSED and REFUSED[model_type] is _ENCODER and getattr(text, "is_decoder", False):
            continue  # its causal form
        if model_type in REFUSED:
            return f"{model_type} {REFUSED[model_type]}; {_INSTEAD}"
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} {_ENCODER_DECODER}; {_INSTEAD}"
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []]
    found = sorted({kind for kind in kinds if any(name in kind for name in _RECURRENT_LAYERS)})
    if found:
        return f"{config.model_type} {_RECURRENT} ({', '.join(found)}); {_INSTEAD}"
    if not model._can_set_attn_implementation():
        return f"{config.model_type} {_OWN_ATTENTION}; {_INSTEAD}"
    return None
