"""The memory of an inference engine beside the learner: weights, and what is left for keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from learner.fit.estimate import GIB

UTILIZATION, WORKING = 0.92, 2 * GIB
"""Part of a GPU that vLLM plans with, and what of it passes and CUDA graphs take: assumed, not measured."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Of each GPU of an engine, in bytes."""

    tensor_parallel: int
    weights: int
    per_token: int  # of keys and values
    room: int  # for them

    def sequences(self, context: int) -> int:
        """How many sequences of that length are held at once."""
        return max(0, self.room // (self.per_token * context))


def engine_memory(model_config: Any, weights: int, memory: float, tensor_parallel: int) -> EngineMemory:
    """An engine in half precision over so many GPUs.

    Args:
        weights: of the whole model. memory: of each GPU that it may use.
    """
    settings = model_config.get_text_config()
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    head = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    width = 2 * max(1, kv_heads // tensor_parallel) * head
    if rank := getattr(settings, "kv_lora_rank", None):  # latent attention caches one vector, whole on every GPU
        width = rank + settings.qk_rope_head_dim
    own = weights // tensor_parallel
    room = int(UTILIZATION * memory) - own - WORKING
    return EngineMemory(tensor_parallel, own, 2 * width * settings.num_hidden_layers, max(0, room))


def tensor_parallel_sizes(model_config: Any, most: int) -> list[int]:
    """Numbers of GPUs over which the heads can be divided, ascending."""
    settings = model_config.get_text_config()
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    return [n for n in (1, 2, 4, 8) if n <= most and heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
