"""The native engine's cache: its memory, and what it holds."""

from __future__ import annotations

import psutil
import pytest
import torch

from actors.engines.native.forward import LayerShape, PromptRows, SlotCache

CPU = torch.device("cpu")


def test_rows_take_memory_when_they_are_written_and_not_before() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = SlotCache([LayerShape(4, 64, 64)] * 4, slots=64, max_tokens=4096, dtype=torch.float32, device=CPU)
    assert cache.nbytes == 2**31
    assert process.memory_info().rss - before < 2**27
    rows = PromptRows.from_rows([[0, 1]], CPU)
    cache.put_prompts(3, rows, torch.ones(1, 4, 512, 64), torch.full((1, 4, 512, 64), 2.0))
    assert cache.keys[3][1, 2, 511].unique().tolist() == [1.0] and cache.values[3][0, 0, 0].unique().tolist() == [2.0]
    assert cache.keys[3][1, 2, 512:].count_nonzero() == 0 and cache.keys[3][2].count_nonzero() == 0


@pytest.mark.parametrize("rows", [[[2], [3], [4]], [[0, 1], [2, 3], [4, 5]], [[1], [3], [5]], [[0, 1], [2], [4, 5]]])
def test_each_prompt_is_in_its_rows_and_in_no_other(rows: list[list[int]]) -> None:
    cache = SlotCache([LayerShape(2, 8, 4)], slots=6, max_tokens=16, dtype=torch.float32, device=CPU)
    keys = torch.arange(1.0, 4.0)[:, None, None, None].expand(3, 2, 5, 8)
    cache.put_prompts(0, PromptRows.from_rows(rows, CPU), keys, 10 * keys[..., :4])
    expected = torch.zeros(6)
    for number, own in enumerate(rows, 1):
        expected[own] = number
    assert torch.equal(cache.keys[0][:, :, :5], expected[:, None, None, None].expand(6, 2, 5, 8))
    assert torch.equal(cache.values[0][:, :, :5], 10 * expected[:, None, None, None].expand(6, 2, 5, 4))
    assert not cache.keys[0][:, :, 5:].any() and not cache.values[0][:, :, 5:].any()


def test_tensors_of_a_cache_outlive_it_and_are_writable() -> None:
    cache = SlotCache([LayerShape(1, 8, 4)], slots=2, max_tokens=16, dtype=torch.bfloat16, device=CPU)
    keys, values = cache.keys[0], cache.values[0]
    del cache
    keys[1, 0, 15] = 3
    assert keys.shape == (2, 1, 16, 8) and values.shape == (2, 1, 16, 4)
    assert keys.sum().item() == 24 and values.sum().item() == 0
