"""The configuration of a model that may not be here: a folder, a config.json alone, or a published shape by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envs.data.hub import hub_answers
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean
from streamrl.weights.model_folder import check_folder, declared_quantization, refusal_of

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-32B": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3 | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""The parts of their config.json that decide memory, so that no hub is needed."""


def values_of_model(name: str) -> dict[str, Any] | None:
    """The values of a config.json, read without a library of models; None for what may be a name of the model hub.

    Raises ConfigError: no such folder or file, or none of a model.
    """
    path = Path(name)
    if path.is_dir():
        check_folder(path, said=name, needs_weights=False)
    if not path.exists() and model_path(name) in PUBLISHED:
        return PUBLISHED[model_path(name)]
    if _may_be_of_hub(name):
        return None
    try:
        values = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        if not isinstance(values, dict) or "model_type" not in values:
            raise ValueError("it names no model_type")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(name, error) from error


def model_path(name: str) -> str:
    """The `policy.model_path` of a model named to this command: one of `PUBLISHED` may lack its owner or capitals."""
    if Path(name).is_file():
        return str(Path(name).parent)
    known = {short.lower(): full for full in PUBLISHED for short in (full, full.partition("/")[2])}
    return name if Path(name).exists() else known.get(name.lower(), name)


def _may_be_of_hub(name: str) -> bool:
    a_path = name.count("/") > 1 or name.startswith((".", "/", "~", "models/", "runs/")) or name.endswith(".json")
    return not a_path and not Path(name).exists()


def config_of_model(name: str) -> Any:
    """The configuration of transformers. Raises ConfigError."""
    values = values_of_model(name)
    from transformers import AutoConfig  # brings torch: after what the name alone tells

    try:
        if values is None:
            values = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
        if (how := declared_quantization(values)) is not None:
            raise ConfigError(f"{name} {refusal_of(how)}")
        return AutoConfig.for_model(**values)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(name, error) from error


def _refused(name: str, error: Exception) -> ConfigError:
    said = " ".join(str(error).split())
    why = f"no configuration of a model can be read there ({type(error).__name__}: {said:.200})"
    if _may_be_of_hub(name):  # its library tells where it looked, at length
        why = "it is neither a folder here nor in the cache of the model hub, which "
        why += "has none of this name that may be read" if hub_answers() else "cannot be reached from here"
    return ConfigError(
        f"{name}: {why}. Give a folder with a config.json, that file, or one of {', '.join(PUBLISHED)}."
        f"{did_you_mean(name, PUBLISHED)}"
    )
