"""The penalty of answers that run out of room."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import require

__all__ = ["overlong_penalty"]


@torch.no_grad()
def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, cache_tokens: int) -> Tensor:
    """Soft overlong penalty in [-1, 0], [B]: 0 up to `max - cache`, then linear to -1 at `max`, -1 beyond.

    Add it to the score, times a scale. DAPO, arXiv:2503.14476, eq. 13.
    """
    require(max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1")
    require(
        0 <= cache_tokens <= max_tokens,
        f"cache_tokens={cache_tokens} and max_tokens={max_tokens} must satisfy 0 <= cache_tokens <= max_tokens",
    )
    require(num_tokens.dim() == 1, f"num_tokens has shape {list(num_tokens.shape)}, expected [B]")
    lengths = num_tokens.to(torch.promote_types(torch.float32, num_tokens.dtype))
    free = max_tokens - cache_tokens
    inside = (free - lengths) / max(cache_tokens, 1)
    penalty = torch.where(lengths > max_tokens, torch.full_like(lengths, -1.0), inside.clamp(-1.0, 0.0))
    return torch.where(lengths <= free, torch.zeros_like(lengths), penalty)
