"""Changes that a model makes to its logits after the output layer: Cohere and Granite scale, Gemma caps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_MOST_DIFFERENCE = 1e-4  # of a logit, relative to the largest; measured about 1e-6


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = cap * tanh(scale * z / cap), z from the output layer; without a cap, scale * z."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Logits of what the output layer gave; works in place."""
        if self.scale != 1.0:
            raw = raw.mul_(self.scale)
        if self.cap is not None:
            raw = raw.div_(self.cap).tanh_().mul_(self.cap)
        return raw

    def pull_back_(self, down: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient in z, from that in the logits; overwrites both. `logits` only with a cap."""
        if self.cap is not None:
            down = down.mul_(logits.div_(self.cap).square_().neg_().add_(1.0))
        return down.mul_(self.scale) if self.scale != 1.0 else down


PLAIN = LogitRule()


@torch.no_grad()
def measure_logit_rule(
    states: Sequence[Tensor], logits: Sequence[Tensor], head: Any, *, cap: float | None
) -> LogitRule:
    """The rule that leads from last hidden states to the model's own logits, read off rows of both.

    Args:
        states, logits: [T, hidden] and [T, vocabulary] of each row, by the model's own forward pass.
        cap: what the model's configuration says.
    Raises:
        ValueError: no such rule does.
    """
    raw = torch.cat([linear(state, head.weight, getattr(head, "bias", None)) for state in states]).double()
    final = torch.cat(list(logits)).double()
    inner = final if cap is None else cap * torch.atanh((final / cap).clamp(-1 + 1e-12, 1 - 1e-12))
    # Near the cap float32 has lost what would invert it.
    sure = torch.ones_like(final, dtype=torch.bool) if cap is None else final.abs() < 0.9 * cap
    scale = float((raw * inner)[sure].sum() / raw[sure].square().sum().clamp_min(1e-300))
    rule = LogitRule(1.0 if abs(scale - 1.0) < 1e-6 else scale, cap)
    difference = float((rule(raw) - final).abs().max() / final.abs().max().clamp_min(1e-12))
    if not difference <= _MOST_DIFFERENCE:
        raise ValueError(
            "its logits are neither a multiple of what the output layer gives nor a soft cap of it (they differ by "
            f"{difference:.2g} of the largest)"
        )
    return rule
