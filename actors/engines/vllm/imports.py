"""Every name of vLLM that streamrl uses: where versions differ, only this file changes.

The table can be read without vLLM. `vllm()` imports it, and vLLM reads its environment then: call it inside
`process.environment`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from streamrl.errors import EngineError

NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": ("engine_args",),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "lora_request"),
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": ("lora_request",),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": (),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": ("new_version",),
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ("tags",),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("method", "timeout", "args"),
    "vllm.v1.engine.async_llm:AsyncLLM.errored": (),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ("timeout",),
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "model", "dtype", "seed", "max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching",
        "kv_cache_memory_bytes", "load_format", "generation_config", "logprobs_mode", "worker_extension_cls",
        "disable_log_stats", "trust_remote_code", "tensor_parallel_size", "gpu_memory_utilization", "enable_lora",
        "device_ids", "enable_sleep_mode", "hf_overrides", "max_lora_rank", "max_loras", "max_cpu_loras",
        "lora_target_modules", "enable_chunked_prefill",
    ),
    "vllm.sampling_params:SamplingParams": (
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
        "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens",
        "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    ),
    "vllm.sampling_params:RequestOutputKind.FINAL_ONLY": (),
    "vllm.outputs:CompletionOutput": ("token_ids", "logprobs", "finish_reason", "weight_versions"),
    "vllm.outputs:WeightVersionSpan": ("version", "start", "end"),
    "vllm.outputs:RequestOutput": ("outputs", "prompt_logprobs", "num_cached_tokens"),
    "vllm.exceptions:VLLMClientError": (),
    "vllm.inputs.engine:tokens_input": ("prompt_token_ids", "cache_salt"),
    "vllm.config:set_current_vllm_config": ("vllm_config",),
    "vllm.model_executor.models:ModelRegistry.models": (),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
}
"""`module:name` of everything used, with the parameters (of a class: of its construction) that it is called with."""

_OUTPUT_LAYER = re.compile(r"ParallelLMHead\(|self\.lm_head\b|init_vllm_registered_model")
"""How a model's class of vLLM makes an output layer; the last makes a language model of another class, with its own."""


def moved(name: str, parameters: tuple[str, ...]) -> str | None:
    """Describe how the installed vLLM differs from one entry of NAMES; None if it is as expected."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{name}: {error}"
    if not parameters:
        return None
    missing = sorted(set(parameters) - inspect.signature(found).parameters.keys())
    return f"{name} takes no {', '.join(missing)}" if missing else None


@cache
def vllm() -> SimpleNamespace:
    """The names that the engine calls, and the version. Raises EngineError if vLLM is not installed."""
    try:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.version import __version__
    except ImportError as error:
        raise EngineError(f"actors.engine=vllm needs vLLM ({error}): run `make vllm`, or see docs/vllm.md") from error
    return SimpleNamespace(
        AsyncEngineArgs=AsyncEngineArgs, AsyncLLM=AsyncLLM, LoRARequest=LoRARequest,
        RequestOutputKind=RequestOutputKind, SamplingParams=SamplingParams, tokens_input=tokens_input,
        refusals=(VLLMClientError, ValueError, TypeError, OverflowError), version=__version__,
    )


def check_names() -> None:
    """Raise EngineError if vLLM is not installed, or lacks names, with all of them in the message."""
    version = vllm().version
    problems = [problem for name, parameters in NAMES.items() if (problem := moved(name, parameters)) is not None]
    if problems:
        raise EngineError(f"vLLM {version} lacks what streamrl uses of it: {'; '.join(problems)}. See docs/vllm.md")


def makes_output_layer(model: type) -> bool:
    """Whether a model's class of vLLM, or one that it is derived from, makes an output layer."""
    own = [part for part in model.__mro__ if part.__module__.partition(".")[0] not in ("torch", "builtins", "abc")]
    return any(_OUTPUT_LAYER.search(inspect.getsource(part)) for part in own)


def check_output_layer(architectures: Sequence[str]) -> None:
    """Raise EngineError for an untied model whose class in vLLM computes logits with the embeddings, whatever comes.

    vLLM would start with random weights, and fail when the first version is installed.
    """
    from vllm.model_executor.models import ModelRegistry

    for architecture in architectures:
        try:
            always_tied = not makes_output_layer(ModelRegistry.models[architecture].load_model_cls())
        except (KeyError, ImportError, OSError, TypeError):  # not one of its own, or it needs a package: vLLM will tell
            continue
        if always_tied:
            raise EngineError(
                f"vLLM's {architecture} has no output layer apart from its embeddings, and this model has one "
                "(tie_word_embeddings=false in config.json): take actors.engine=native"
            )
