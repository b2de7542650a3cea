"""Buckets of the native engine's decode graphs, and what all graphs of a model take of a GPU."""

from __future__ import annotations

from typing import Any

FEWEST_ROWS, ROW_PARTS = 4, 2
FEWEST_PLACES, PLACE_PARTS = 256, 4
SETS = 2
"""Sets of weights take turns, and each has graphs of its own."""
_BYTES_A_LAYER = 40 << 10
"""A layer has forty kernels of a KiB each in a graph: assumed, because no GPU was measured."""


def bucket(count: int, fewest: int, parts: int) -> int:
    """Round up to a multiple of `fewest`, and to one of `parts` steps between powers of two where that is more."""
    step = max(fewest, (1 << (count - 1).bit_length()) // (2 * parts))
    return -(-count // step) * step


def graph_bytes(model_config: Any, rows: int, span: int) -> int:
    """Memory of the graphs for up to so many sequences of up to so many tokens.

    Graphs share one pool, which holds the logits (as made and in float32) and masks of the largest, and one buffer.
    """
    settings, counts = model_config.get_text_config(), []
    for most, fewest, parts in ((rows, FEWEST_ROWS, ROW_PARTS), (span, FEWEST_PLACES, PLACE_PARTS)):
        size = number = 0
        while size < most:
            size, number = bucket(size + 1, fewest, parts), number + 1
        counts.append(number)
    graphs = SETS * counts[0] * counts[1] * settings.num_hidden_layers * _BYTES_A_LAYER
    return graphs + rows * settings.vocab_size * (4 + 4 + 2) + rows * span * 16
