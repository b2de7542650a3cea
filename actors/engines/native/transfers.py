"""Results of a pass on their way to the host, which does not wait for a GPU before it needs them."""

from __future__ import annotations

import torch
from torch import Tensor


class Arrival:
    """Tokens and log-probs [n] of a pass on their way to the host, together: a double holds any of either."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        numbers = torch.stack([tokens.double(), logprobs.double()])
        cuda = numbers.is_cuda
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=cuda)
        self._host.copy_(numbers, non_blocking=cuda)
        self._done = torch.cuda.current_stream(numbers.device).record_event() if cuda else None

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for them."""
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs = self._host.tolist()
        return list(map(int, tokens)), logprobs
