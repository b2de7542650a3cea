"""The native engine's weights: two sets of tensors, of which one serves and one is filled, and adapters beside them.

Each adapted layer adds `scale * up @ (down @ input)`, of the version of each token. Several versions may serve in one
pass, because a sequence may end with the version that it began with: the product with the large weights is shared, and
each version adds its own to its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actors.engines.base import AdapterSpec
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.adapter import DOWN, UP, Factors, factors_of
from streamrl.weights.gpu.pinned import Upload, upload

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
    """Names of the matrices of linear layers but the output layer, which embeddings may share. EngineError: none."""
    head = model.get_output_embeddings()
    found = [
        f"{name}.weight" for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    if not found:  # the setting would change nothing, and no bit of the weights be compared
        raise EngineError(
            f"actors.weights=int8 rounds linear layers, and {type(model).__name__} has none beside its output layer: "
            "leave actors.weights=full"
        )
    return found


def round_to_int8_(weight: Tensor) -> None:
    """Round to the levels of int8: 255 in each row, even between plus and minus its largest magnitude."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1, keepdim=True).div_(127.0)
    weight.copy_(torch.where(scale > 0, (wide / scale).round_() * scale, wide))


def _like(tensors: Mapping[str, Tensor], device: torch.device) -> Staged:
    """New tensors, which share blocks of memory as these do."""
    blocks: dict[tuple[int, torch.dtype], Tensor] = {}
    made = {}
    for name, tensor in tensors.items():
        block = tensor.untyped_storage()
        key = block._cdata, tensor.dtype  # on the meta device all addresses are 0
        if key not in blocks:
            size = block.nbytes() // tensor.element_size()
            blocks[key] = torch.empty(size, dtype=tensor.dtype, device=device)
        made[name] = blocks[key].as_strided(
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )
    return made


class WeightSets:
    """Fills and swaps. `stage` may run in any thread, `swap` only where nothing is computing.

    Args:
        rounded: names of matrices that are rounded to int8 as they come.
    """

    def __init__(self, model: torch.nn.Module, rounded: Sequence[str] = ()) -> None:
        self._rounded = tuple(rounded)
        self.live: Mapping[str, Tensor] = MappingProxyType(checkpoint_tensors(model))
        """The tensors that serve now, by checkpoint name."""
        self._device = next(iter(self.live.values())).device
        self._form = _like(self.live, torch.device("meta"))
        self._spare: Staged | None = None
        self._upload = Upload(self._device)

    def stage(self, tensors: Mapping[str, Any]) -> Staged:
        """Copy a document that fits the model (else WeightsError) into spare tensors, casting floats."""
        check_document(tensors, self._form)
        # Moved out: if this call is abandoned halfway, the next one allocates tensors of its own.
        staged, self._spare = self._spare, None
        if staged is None:
            staged = _like(self._form, self._device)
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
        # After a release there is nothing to fill again.
        self._spare = old if keep_spare and all(one.numel() for one in old.values()) else None

    def release(self) -> None:
        """Drop both sets; only where nothing is computing."""
        self._spare = None
        for live in self.live.values():
            live.data = torch.empty(0, dtype=live.dtype, device=self._device)


KEPT_VERSIONS = 8
"""The newest versions stay, for a later turn of an episode that began with one of them."""


class AdapterSets:
    """The adapters of one model. `stage` may run in any thread, everything else only where nothing is computing."""

    def __init__(self, model: torch.nn.Module, spec: AdapterSpec) -> None:
        modules = dict(model.named_modules())
        self._shapes: dict[str, torch.Size] = {}
        for layer in spec.layers:
            module = modules.get(layer)
            if not isinstance(module, torch.nn.Linear):
                raise EngineError(
                    f"the run's adapters have a layer {layer}, which is no linear layer of this model: leave it out "
                    "with policy.lora.exclude"
                )
            self._shapes[layer] = module.weight.shape
            module.register_forward_hook(partial(self._add, layer))
        like = next(iter(model.parameters()))
        self._device, self._dtype, self._scale = like.device, like.dtype, spec.scale
        self._sets: OrderedDict[VersionRef, Mapping[str, Factors]] = OrderedDict()
        self._active: list[tuple[Tensor | None, Mapping[str, Factors]]] = []

    def stage(self, tensors: Mapping[str, Any]) -> dict[str, Factors]:
        """Copies of an adapter that fits the model (else WeightsError), in its type."""
        given = factors_of(tensors)
        if given.keys() != self._shapes.keys():
            strange = sorted(given.keys() ^ self._shapes.keys())[0]
            raise WeightsError(f"the adapter's layers are not those of this run: {strange}. The old one keeps serving.")
        staged = {}
        for layer, (down, up) in given.items():
            if (up.shape[0], down.shape[1]) != tuple(self._shapes[layer]):
                raise WeightsError(
                    f"the adapter of {layer} is for [{up.shape[0]}, {down.shape[1]}], the layer is "
                    f"{list(self._shapes[layer])}. The old version keeps serving."
                )
            here = (upload(one, self._device) for one in (down, up))
            staged[layer] = Factors(*(one.to(self._dtype, copy=True) for one in here))
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return staged

    def add(self, ref: VersionRef, staged: Mapping[str, Factors], in_use: Collection[VersionRef]) -> None:
        """Make a staged adapter the newest; of older ones those in use stay, and a few."""
        self._sets[ref] = staged
        self._sets.move_to_end(ref)
        for old in list(self._sets)[:-KEPT_VERSIONS]:
            if old not in in_use:
                del self._sets[old]

    def has(self, ref: VersionRef | None) -> bool:
        return ref in self._sets

    def release(self) -> None:
        """Drop all adapters."""
        self._sets.clear()
        self._active = []

    @property
    def live(self) -> dict[str, Tensor]:
        """The newest adapter's tensors, by their names in its document."""
        newest = self._sets[next(reversed(self._sets))] if self._sets else {}
        return {
            layer + end: factor
            for layer, pair in newest.items() for end, factor in zip((DOWN, UP), pair, strict=True)
        }

    def route(self, versions: Sequence[VersionRef], lengths: Sequence[int]) -> None:
        """Set the adapter of each token of the next pass: runs of `lengths` tokens, a version for each."""
        if len(set(versions)) == 1:
            self._active = [(None, self._sets[versions[0]])]
            return
        number = {ref: at for at, ref in enumerate(dict.fromkeys(versions))}
        of_token = torch.tensor([number[ref] for ref in versions]).repeat_interleave(torch.tensor(lengths))
        self._active = [
            ((of_token == at).nonzero()[:, 0].to(self._device), self._sets[ref]) for ref, at in number.items()
        ]

    def _add(self, layer: str, module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A hook after the layer: in place, for one pass through memory."""
        inputs, outputs = args[0].reshape(-1, args[0].shape[-1]).to(output.dtype), output.view(-1, output.shape[-1])
        for index, factors in self._active:
            down, up = (factor.to(outputs.dtype) for factor in factors[layer])  # logits are wider than the model
            if index is None:
                outputs.addmm_(inputs @ down.T, up.T, alpha=self._scale)
            else:
                outputs.index_add_(0, index, (inputs[index] @ down.T) @ up.T, alpha=self._scale)
