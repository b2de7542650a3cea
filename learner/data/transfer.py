"""Readings of what is on a device: many of them wait for it once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from streamrl.weights.gpu.pinned import upload

Part = TypeVar("Part")
"""A dataclass, some of whose fields are tensors."""
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


def on_host(*parts: Any) -> list[Any]:
    """The same dataclasses with the tensors in their fields on the host; a single copy brings all of them."""
    found = []

    def reading(part: Any) -> Reading:
        held = _tensors(part)
        tensors = yield list(held.values())
        found.append(replace(part, **dict(zip(held, tensors, strict=True))))

    read_at_once(*map(reading, parts))
    return found


def on_device(part: Part, device: torch.device) -> Part:
    """The same dataclass with the tensors in its fields on `device`."""
    return replace(part, **{name: upload(tensor, device) for name, tensor in _tensors(part).items()})


def _tensors(part: Any) -> dict[str, Tensor]:
    found = ((one.name, getattr(part, one.name)) for one in fields(part))
    return {name: value for name, value in found if isinstance(value, Tensor)}
