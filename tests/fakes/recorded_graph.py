"""Stand-ins for CUDA graphs on a CPU. No kernel is captured: the operations of torch are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Work = Callable[[], None]


class RecordedGraphs:
    """A stand-in for `CudaCapture`: it records the operations of a pass and repeats each on the very tensors.

    As in a graph the numbers of Python and the tensors that the pass made of them stay what they were, and a result
    lies where it lay. After each replay all results are spoiled: memory of a graph is another graph's next.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.recorded += 1
        with _Recorder() as recorder:
            work()
        recorder.spoil()

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, places in recorder.steps:
                result = func(*args, **kwargs)
                for number, place in places.items():
                    place.copy_(result if number is None else _tensors(result)[number])
            recorder.spoil()

        return replay


class PassesAgain:
    """A stand-in that captures nothing: every replay is the pass itself, of the same shape."""

    def __call__(self, work: Work) -> Work:
        return work


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # What each operation filled of new memory, by its number among the results, None where it has but one.
        self.steps: list[tuple[Any, Any, Any, dict[int | None, Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        results = {None: out} if isinstance(out, Tensor) else dict(enumerate(_tensors(out)))
        places = {number: tensor for number, tensor in results.items() if _memory(tensor) not in given}
        if func._schema.is_mutable or places:  # else a view, which stays one
            self.steps.append((func, *tree_map(_as_it_lies, (args, kwargs)), places))
        return out

    def spoil(self) -> None:
        for *_, places in self.steps:
            for place in places.values():
                place.fill_(math.nan if place.is_floating_point() else 0)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _as_it_lies(leaf: Any) -> Any:
    """The memory of a tensor at this time: an install gives a parameter other memory."""
    return leaf.detach() if isinstance(leaf, Tensor) and torch._C._has_storage(leaf) else leaf


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else id(tensor)
