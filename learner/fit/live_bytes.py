"""Counts the memory that tensors hold, by kind and over time, as operations make and drop them.

It works on fake tensors, which have shapes and no memory, as on real ones. Memory that a kernel takes for itself is not
seen. A tensor's kind may be known only later, as that a number is a gradient: so every event is kept, and the kinds are
put together at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.fit.stand_ins import grouped_product
from learner.ranks.mesh import local_part

ACTIVATIONS, GATHERED, GRADIENTS, LOGITS = "activations", "gathered weights and gradients", "gradients", "logits"
HOST = "moments in host memory"
"""Tensors of this kind take no memory of a GPU."""
_COMMUNICATION = ("fsdp", "c10d", "_c10d_functional")  # operators that move sharded parameters and gradients
# They write where their arguments are; torch 2.11 fails at the one, and for the other makes a copy of every state.
_IN_PLACE = (torch.ops.aten.addmm.dtype_out, torch.ops.aten._fused_adamw_.default)


class LiveBytes(TorchDispatchMode):
    """Events of storages: made, resized, freed.

    Args:
        vocabulary: a new matrix so wide holds logits, one so high the gradient of the output layer.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._events: list[tuple[int, int]] = []  # number of the storage, bytes
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address -> number
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._phases: list[tuple[str, int]] = []

    def __enter__(self) -> LiveBytes:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # how FSDP2 frees memory
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it made."""
        if func in _IN_PLACE:
            return kwargs.get("out")
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operators on the local parts
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            out = grouped_product(*args[:2], args[2] if len(args) > 2 else kwargs["offs"])
        else:
            out = func(*args, **(kwargs or {}))
        if func.namespace in _COMMUNICATION:
            self.label(GATHERED, (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._seen(leaf)
        return out

    def begin(self, phase: str) -> None:
        """Begin a phase, to which the events from here on belong."""
        self._phases.append((phase, len(self._events)))

    def label(self, kind: str, tensors: Iterable[Tensor], *, again: bool = False) -> None:
        """Say what these are; `again` also for those of which something is known."""
        for tensor in tensors:
            number = self._seen(local_part(tensor))
            if again or self._kinds[number] == ACTIVATIONS:
                self._kinds[number] = kind

    def peaks(self) -> dict[str, Counter[str]]:
        """Bytes by kind at the peak of every phase."""
        found, held, at = {}, Counter[str](), 0
        ends = [*self._phases, ("", len(self._events))]
        for (phase, first), (_, last) in pairwise(ends):
            for number, nbytes in self._events[at:first]:
                held[self._kinds[number]] += nbytes
            total = most = held.total()
            best = Counter(held)
            for number, nbytes in self._events[first:last]:
                held[self._kinds[number]] += nbytes
                total += nbytes
                if total > most:
                    most, best = total, Counter(held)
            found[phase], at = best, last
        return found

    def _seen(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._known:
            number = len(self._sizes)
            self._known[address] = number, weakref.ref(storage, partial(self._freed, address))
            self._sizes.append(storage.nbytes())
            self._kinds.append(self._kind_of(tensor))
            self._events.append((number, storage.nbytes()))
        return self._known[address][0]

    def _kind_of(self, tensor: Tensor) -> str:
        if tensor.dim() == 2 and tensor.shape[1] == self._vocabulary:
            return LOGITS
        return GRADIENTS if tensor.dim() == 2 and tensor.shape[0] == self._vocabulary else ACTIVATIONS

    def _freed(self, address: int, _: Any) -> None:
        number, _ = self._known.pop(address)
        self._events.append((number, -self._sizes[number]))

    def _resized(self, storage: Any, size: int) -> Any:
        out = self._resize(storage, size)
        if storage._cdata in self._known:
            number = self._known[storage._cdata][0]
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size
            self._kinds[number] = GATHERED
        return out
