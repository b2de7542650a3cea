"""Rotary embeddings whose frequencies depend on the length of a pass, fixed for a run.

transformers chooses the frequencies of longrope (Phi-3-128k) and of dynamic NTK by the longest row of each forward
pass. Where rows of different length share a pass, most get the wrong ones; and a sequence that grows past the original
length while it is generated changes its keys' rotation halfway, which no later pass over the whole row repeats. So the
choice is made once, by the longest sequence that the run may have, as vLLM does for longrope: every process then
computes one function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "fixed"
_CHANGES_SCALE = frozenset({"phimoe"})


def fix_rope(model: torch.nn.Module, max_tokens: int | None) -> None:
    """Give every rotary embedding of `model` the frequencies of a run whose sequences have at most `max_tokens`.

    longrope has the long factors if `max_tokens` is beyond the original length, else the short ones. dynamic NTK has no
    frequencies that hold for rows of every length beyond it. None: the original length is not passed.

    Raises:
        ValueError: dynamic NTK, or phimoe, beyond the original length.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            if depends_on_length(kind):
                _fix(module, kind, None, max_tokens)
                module.rope_type = FIXED
        elif isinstance(kind, dict):
            for layer_type, name in kind.items():
                if name is not None and depends_on_length(name):
                    _fix(module, name, layer_type, max_tokens)
                    module.rope_type = {**module.rope_type, layer_type: FIXED}


def original_length(config: Any) -> int | None:
    """The length beyond which the frequencies of a text configuration change; None if they never do."""
    found = [
        _original(config, parameters) for parameters in _parameters(config)
        if depends_on_length(parameters.get("rope_type") or "")
    ]
    return min(found) if found else None


def has_dynamic_rope(config: Any) -> bool:
    """Whether a text configuration has dynamic NTK."""
    return any("dynamic" in (parameters.get("rope_type") or "") for parameters in _parameters(config))


def depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _parameters(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of all layer types together, or of each."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [value for value in found.values() if isinstance(value, dict)]


def _original(config: Any, parameters: dict[str, Any]) -> int:
    return int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)


def _fix(module: Any, kind: str, layer_type: str | None, max_tokens: int | None) -> None:
    config = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = _original(config, parameters)
    if max_tokens is None or max_tokens <= original:
        return  # as it was built
    if config.model_type in _CHANGES_SCALE:
        raise ValueError(
            f"{config.model_type} scales rotary embeddings differently beyond {original} tokens, and transformers and "
            f"vLLM differ in it; this run allows {max_tokens}: keep prompt and answer within {original}"
        )
    if kind != "longrope":
        raise ValueError(
            f"its rotary embedding ({kind}) changes with the length of every row beyond {original} tokens, and this "
            f"run allows {max_tokens}: keep prompt and answer within {original}, or set a fixed rope_type (yarn, "
            "linear) in config.json"
        )
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer = getattr(module, f"{prefix}inv_freq")
    extra = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, buffer.device, seq_len=original + 1, **extra)
    with torch.no_grad():
        buffer.copy_(frequencies)
