"""Readings of what is on a device: many of them wait for it once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

Reading = Generator[Sequence[Tensor], Sequence[Tensor], None]
"""Yields tensors once, and goes on with the same ones on the host; one that has nothing to read yields none."""


@torch.no_grad()
def read_at_once(*readings: Reading) -> None:
    """Carry out readings with a single copy from the device; float64 holds every number of theirs."""
    wanted = [tuple(next(reading, ())) for reading in readings]
    flat = [one.detach().reshape(-1).double() for tensors in wanted for one in tensors]
    parts = iter(torch.cat(flat).cpu().split([len(one) for one in flat]) if flat else ())
    for reading, tensors in zip(readings, wanted, strict=True):
        found = [next(parts).to(one.dtype).view(one.shape) for one in tensors]
        with suppress(StopIteration):
            reading.send(found)
