"""What docs/models.md says of each family: `python -m tests.unit.architectures.families` writes its table again.

The families are those that transformers registers for causal language models. Those that are listed as exact are proved
by `test_families.py`, on a miniature of each.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from streamrl.architectures.refusals import REFUSED, why_refused

_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

EXACT: dict[str, dict[str, Any]] = {
    **dict.fromkeys((
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere", "cohere2",
        "cohere2_moe", "ctrl", "cwm", "deepseek_v3", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
        "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4",
        "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa",
        "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hy_v3", "hyperclovax", "internlm3",
        "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama", "llama4_text", "longcat_flash", "mellum",
        "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral3", "mistral", "mixtral", "nanochat",
        "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "seed_oss", "smollm3", "solar_open",
        "stablelm", "vaultgemma", "youtu",
    ), {}),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _WINDOW),
    **dict.fromkeys(("phimoe", "starcoder2"), {"sliding_window": 8}),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 8}),
    "deepseek_v2": {**_EXPERTS, "first_k_dense_replace": 1}, "dots1": _EXPERTS,
    "nemotron": {"num_key_value_heads": 8, "head_dim": 8},
}
"""model_type -> what is set beside the defaults of its configuration, to build it or to make its window show."""


def config_of(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type](**EXACT.get(model_type, {}))


def reason(model_type: str) -> str:
    """Why a family is not exact, as learner and engine say it; empty if that is not known."""
    if model_type in REFUSED:
        return REFUSED[model_type]
    try:
        config = CONFIG_MAPPING[model_type]()
        built = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = SimpleNamespace(config=config, _can_set_attn_implementation=built._can_set_attn_implementation)
        return (why_refused(model) or "").removeprefix(f"{model_type} ").partition("; take")[0]
    except Exception:  # a configuration that cannot be made from its defaults
        return ""


_TEXT_PART = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text",
    "gpt-sw3": "gpt2",
}
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_HEADER = "| family | learner | native engine | |\n|---|---|---|---|\n"


def table() -> str:
    """The last part of docs/models.md."""
    rows = []
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        why = reason(name)
        if name in EXACT:
            rows.append((name, "exact", "exact", "with a sliding window" if "sliding_window" in EXACT[name] else ""))
        elif name in _TEXT_PART:
            rows.append((name, "not proved", "not proved", f"its text part is `{_TEXT_PART[name]}`"))
        else:
            result = "refused" if why else "not proved"
            rows.append((name, result, result, why))
    lines = [f"| `{name}` | {learner} | {engine} | {note} |" for name, learner, engine, note in rows]
    return _HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(_HEADER)[0] + table())
