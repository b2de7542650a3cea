"""The native engine's cache: its memory, and what it holds."""

from __future__ import annotations

import psutil
import torch

from actors.engines.native.attention import LayerShape, SlotCache

CPU = torch.device("cpu")


def test_rows_take_memory_when_they_are_written_and_not_before() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = SlotCache([LayerShape(4, 64, 64)] * 4, slots=64, max_tokens=4096, dtype=torch.float32, device=CPU)
    assert cache.nbytes == 2**31
    assert process.memory_info().rss - before < 2**27
    cache.put_prompts(3, [[0, 1]], torch.ones(1, 4, 512, 64), torch.full((1, 4, 512, 64), 2.0))
    assert cache.keys[3][1, 2, 511].unique().tolist() == [1.0] and cache.values[3][0, 0, 0].unique().tolist() == [2.0]
    assert cache.keys[3][1, 2, 512:].count_nonzero() == 0 and cache.keys[3][2].count_nonzero() == 0


def test_tensors_of_a_cache_outlive_it_and_are_writable() -> None:
    cache = SlotCache([LayerShape(1, 8, 4)], slots=2, max_tokens=16, dtype=torch.bfloat16, device=CPU)
    keys, values = cache.keys[0], cache.values[0]
    del cache
    keys[1, 0, 15] = 3
    assert keys.shape == (2, 1, 16, 8) and values.shape == (2, 1, 16, 4)
    assert keys.sum().item() == 24 and values.sum().item() == 0
