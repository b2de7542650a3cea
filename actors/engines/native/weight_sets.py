"""Two sets of a model's tensors: one serves, the other is filled, and a pointer swap exchanges them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from streamrl.errors import WeightsError

Staged = dict[str, Tensor]


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, list[Tensor]]:
    """Checkpoint name -> the live tensors it fills: parameters and persistent buffers.

    Of tensors that are one object (tied weights) only the first name appears, as in a checkpoint; filling it fills all.
    """
    named: dict[str, list[Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = [tensor]
    return named


def check_document(tensors: Mapping[str, Any], live: Mapping[str, Tensor]) -> None:
    """A document against a model's own tensors; a float tensor may come in another float type.

    Raises:
        WeightsError: a name is missing or unknown, a shape or type does not fit.
    """
    missing = sorted(live.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - live.keys())
    if missing or unknown:
        raise WeightsError(
            f"the document's names are not the model's: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}; tied copies are left out. The old version goes on serving."
        )
    for name, own in live.items():
        given = tensors[name]
        if tuple(given.shape) != tuple(own.shape):
            raise WeightsError(
                f"{name} has shape {list(given.shape)}, the model needs {list(own.shape)}. "
                "The old version goes on serving."
            )
        if given.dtype != own.dtype and not (given.is_floating_point() and own.is_floating_point()):
            raise WeightsError(
                f"{name} has type {given.dtype}, the model needs {own.dtype}. The old version goes on serving."
            )


class WeightSets:
    """Fills and swaps. `stage` may run in any thread, `swap` only where nothing is computing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._live = {name: tensors[0] for name, tensors in checkpoint_tensors(model).items()}
        self._spare: Staged | None = None

    @property
    def live(self) -> Mapping[str, Tensor]:
        """The tensors that serve now, by checkpoint name."""
        return MappingProxyType(self._live)

    def stage(self, tensors: Mapping[str, Any]) -> Staged:
        """Check a document against the model and copy it into tensors of our own.

        A float tensor may come in another float type: it is cast. Everything else must be equal.

        Raises:
            WeightsError: a name is missing or unknown, a shape or type does not fit; the model is untouched.
        """
        check_document(tensors, self._live)
        # Taken, not borrowed: if this call is abandoned, the next one allocates its own.
        staged, self._spare = self._spare, None
        if staged is None:
            staged = {name: torch.empty_like(live, requires_grad=False) for name, live in self._live.items()}
        with torch.no_grad():
            for name, target in staged.items():
                target.copy_(tensors[name])
        if any(target.is_cuda for target in staged.values()):
            torch.cuda.current_stream().synchronize()
        return staged

    def swap(self, staged: Staged) -> None:
        """Exchange the sets: each tensor object stays, so tied weights stay tied; the old storage becomes the spare."""
        old: Staged = {}
        for name, live in self._live.items():
            old[name] = live.data
            live.data = staged[name]
        self._spare = old
