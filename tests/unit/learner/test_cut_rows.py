"""Parts of a packed row: each rank of a context axis must compute exactly its tokens of the whole row."""

from __future__ import annotations

import random

import pytest
import torch

from learner.data.layout import cut_layout, make_layout
from learner.model.attention.kernels import Ends, attend_in_blocks, attend_varlen
from streamrl.architectures.attention import CAUSAL, MaskRule, attend

WINDOW = MaskRule(lambda row, head, query, key: (key <= query) & (key > query - 4), local_size=4)
CHUNKS = MaskRule(lambda row, head, query, key: (key <= query) & (key // 3 == query // 3), local_size=3, plain=False)


def by_sequence(query, key, value, ends: Ends, scale, left):
    """A kernel for sequences of different length, one after another: queries end where keys do."""
    found = []
    for one in range(len(ends.queries) - 1):
        (first, last), (low, high) = ends.queries[one : one + 2].tolist(), ends.keys[one : one + 2].tolist()
        places = torch.arange(high - low)
        seen = places <= places[len(places) - (last - first) :, None]
        if left >= 0:
            seen &= places >= places[len(places) - (last - first) :, None] - left
        parts = (t.transpose(0, 1)[None] for t in (query[first:last], key[low:high], value[low:high]))
        found.append(attend(*parts, mask=seen[None, None], scaling=scale)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("rule", [CAUSAL, WINDOW, CHUNKS], ids=["causal", "window", "chunks"])
def test_the_parts_of_a_row_are_the_row_whatever_a_rule_hides(rule):
    chance = random.Random(0)
    torch.manual_seed(0)
    for _ in range(60):
        lengths = [chance.randint(1, 9) for _ in range(chance.randint(1, 6))]
        parents = [chance.choice([-1, *range(child)]) for child in range(len(lengths))]
        size = chance.choice([2, 3, 4])
        padding = -sum(lengths) % size
        width = (sum(lengths) + padding) // size
        packing = make_layout([*lengths, *[1] * padding], [*parents, *[-1] * padding])
        query, key, value = (torch.randn(width * size, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
        whole = attend_in_blocks(query, key, value, packing, rule)
        for part in (slice(at * width, (at + 1) * width) for at in range(size)):
            cut = cut_layout(
                make_layout(lengths, parents), part.start, part.stop, padding=padding, gather=lambda keys: keys
            )
            torch.testing.assert_close(attend_in_blocks(query[part], key, value, cut, rule), whole[part])
            varied = attend_varlen(by_sequence, query[part], key, value, cut, rule)
            torch.testing.assert_close(varied, whole[part])
