"""Double-buffered weights: one set of tensors serves, the other is filled, and a pointer swap exchanges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from streamrl.errors import WeightsError
from streamrl.weights.gpu.pinned import Upload

Staged = dict[str, Tensor]
_KEPT = "The old version goes on serving."


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> live tensor: parameters and persistent buffers; of tied weights only the first name."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def check_document(tensors: Mapping[str, Any], live: Mapping[str, Tensor]) -> None:
    """Raise WeightsError for a name, shape or type that is not the model's; floats may come in another float type."""
    missing = sorted(live.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - live.keys())
    if missing or unknown:
        raise WeightsError(
            f"the document's names are not the model's: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}; tied copies are left out. {_KEPT}"
        )
    for name, own in live.items():
        given = tensors[name]
        if tuple(given.shape) != tuple(own.shape):
            raise WeightsError(f"{name} has shape {list(given.shape)}, the model needs {list(own.shape)}. {_KEPT}")
        if given.dtype != own.dtype and not (given.is_floating_point() and own.is_floating_point()):
            raise WeightsError(f"{name} has type {given.dtype}, the model needs {own.dtype}. {_KEPT}")


def linear_weights(model: torch.nn.Module) -> list[str]:
    """Names of the matrices of all linear layers but the output layer, which embeddings may share."""
    head = model.get_output_embeddings()
    return [
        f"{name}.weight" for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]


def round_to_int8_(weight: Tensor) -> None:
    """Round to 255 levels in each row, even between plus and minus its largest magnitude: what int8 weights hold."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1, keepdim=True).div_(127.0)
    weight.copy_(torch.where(scale > 0, (wide / scale).round_() * scale, wide))


class WeightSets:
    """Fills and swaps. `stage` may run in any thread, `swap` only where nothing is computing.

    Args:
        rounded: names of matrices that are rounded to int8 as they come.
    """

    def __init__(self, model: torch.nn.Module, rounded: Sequence[str] = ()) -> None:
        self._rounded = tuple(rounded)
        self.live: Mapping[str, Tensor] = MappingProxyType(checkpoint_tensors(model))
        """The tensors that serve now, by checkpoint name."""
        self._spare: Staged | None = None
        self._upload = Upload(next(iter(self.live.values())).device)

    def stage(self, tensors: Mapping[str, Any]) -> Staged:
        """Copy a document that fits the model (else WeightsError) into spare tensors, casting floats."""
        check_document(tensors, self.live)
        # Moved out: if this call is abandoned halfway, the next one allocates tensors of its own.
        staged, self._spare = self._spare, None
        if staged is None:
            staged = {name: torch.empty_like(live, requires_grad=False) for name, live in self.live.items()}
        for name, target in staged.items():
            self._upload.copy(tensors[name], target)
        self._upload.finish()
        for name in self._rounded:
            round_to_int8_(staged[name])
        return staged

    def swap(self, staged: Staged, *, keep_spare: bool = True) -> None:
        """Exchange the storage of each tensor: tied weights stay tied, and the old storage becomes the spare."""
        old: Staged = {}
        for name, live in self.live.items():
            old[name] = live.data
            live.data = staged[name]
        self._spare = old if keep_spare else None
