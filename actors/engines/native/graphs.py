"""Decode steps as graphs: a pass that was captured once and is launched whole, without the Python of a model's layers.

A small model's step on a GPU is a thousand kernels of a few microseconds, and launching them takes ten times as long
as running them. A graph repeats the kernels of one pass on the very tensors that they had. So a captured pass reads
its tokens from buffers that stay, has the shape of a bucket of rows and a bucket of cached places, and belongs to the
storage of the weights that served when it was captured: two sets take turns, and each keeps its graphs.

Padding rows read the cache as any row does and write to one row that no sequence ever gets, so that real rows cannot
see them. What a graph cannot repeat (a result that the host reads, a shape that depends on values, a tensor on the
host) is looked for in one pass before the first capture; a model that does such things keeps the plain pass.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamrl.architectures.decode_graphs import FEWEST_PLACES, FEWEST_ROWS, PLACE_PARTS, ROW_PARTS, SETS, bucket
from streamrl.weights.gpu.pinned import upload

log = logging.getLogger("streamrl.actor")

Work = Callable[[], None]
Decode = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Logits [rows, vocab] of tokens and their positions [rows]; the cache rows to write to [rows]; the places to read."""


class Capture(Protocol):
    """A way to capture a pass."""

    def __call__(self, work: Work) -> Work:
        """Capture `work`, which reads and writes tensors that stay; the result repeats it on what they hold then."""


class CudaCapture:
    """Captures CUDA graphs, which share one pool of memory: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> Work:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # libraries load kernels and take workspaces in the first pass of a shape
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # The thread that stages the next version may allocate meanwhile.
        capturing = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
        )
        try:
            with capturing:
                work()
        finally:
            torch.cuda.set_stream(current)  # which a capture that failed leaves out
        return graph.replay


class _Set(NamedTuple):
    """The graphs of one storage of weights."""

    prepared: object  # kept, so that no other object gets its id
    graphs: dict[tuple[int, int], Work]


class DecodeGraphs:
    """The decode passes of one model by (rows, places, weights). All methods belong to one thread.

    Args:
        weights: the model's tensors, whose storage may be exchanged between two passes.
        slots: rows of the cache that sequences get; the row after them takes what padding rows write.
        max_tokens: of the longest sequence.
    """

    def __init__(
        self,
        decode: Decode,
        capture: Capture,
        weights: Sequence[Tensor],
        *,
        slots: int,
        max_tokens: int,
    ) -> None:
        self.refused: str | None = None
        """Why every pass is plain; None while graphs are used."""
        self._decode, self._capture = decode, capture
        self._weights = list(weights)
        self._slots, self._max_tokens = slots, max_tokens
        device = self._weights[0].device
        with torch.inference_mode(False):
            # Tokens, their positions, and the rows that their keys and values go to.
            self._inputs = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._rows = torch.arange(slots)
        self._logits: Tensor | None = None
        self._sets: OrderedDict[tuple[int, ...], _Set] = OrderedDict()

    def run(self, ids: Tensor, positions: Tensor, longest: int, prepared: object) -> Tensor | None:
        """Logits [n, vocab], which stay until the next call; None where the plain pass is to run.

        Args:
            ids, positions: [n] int64, as in `Forward.run`.
            longest: cached tokens of the longest row after this pass.
            prepared: what else than `weights` the pass reads them from; it is replaced and never changed.
        """
        n = ids.shape[0]
        rows = min(bucket(n, FEWEST_ROWS, ROW_PARTS), self._slots)
        places = min(bucket(longest, FEWEST_PLACES, PLACE_PARTS), self._max_tokens)
        host = torch.zeros((2, self._slots), dtype=torch.int64)
        host[0, :n] = positions
        host[1, :n] = self._rows[:n]
        host[1, n:rows] = self._slots
        self._inputs[0, :n].copy_(ids)
        self._inputs[1:].copy_(upload(host, self._inputs.device))
        graphs = self._graphs_of(prepared)
        if (rows, places) not in graphs:
            try:
                graphs[rows, places] = self._captured(rows, places)
            except Exception as error:  # of a model's code, of a kernel that no graph holds, or of a full device
                self.refused = f"{type(error).__name__}: {error}"
            if self.refused is not None:
                log.warning("the native engine decodes without graphs: %s", self.refused)
                self.clear()
                return None
        graphs[rows, places]()
        return self._logits[:n]

    def clear(self) -> None:
        """Drop every graph, when the memory that they read and write is given back."""
        self._sets.clear()
        self._logits = None

    def _graphs_of(self, prepared: object) -> dict[tuple[int, int], Work]:
        storage = (id(prepared), *(tensor.data_ptr() for tensor in self._weights))
        if storage not in self._sets:
            self._sets[storage] = _Set(prepared, {})
        self._sets.move_to_end(storage)
        while len(self._sets) > SETS:
            self._sets.popitem(last=False)
        return self._sets[storage].graphs

    def _captured(self, rows: int, places: int) -> Work:
        ids, positions, targets = self._inputs[:, :rows]
        if self._logits is None:
            with Unrepeatable(ids.device) as found:
                logits = self._decode(ids, positions, targets, places)
            if found.reason is not None:
                raise TypeError(found.reason)
            with torch.inference_mode(False):
                self._logits = torch.zeros((self._slots, logits.shape[1]), dtype=logits.dtype, device=logits.device)
        kept = self._logits[:rows]
        return self._capture(lambda: kept.copy_(self._decode(ids, positions, targets, places)))


class Unrepeatable(TorchDispatchMode):
    """Finds the first operation of a pass that a graph cannot repeat."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.reason: str | None = None
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.reason is None:
            self.reason = self._why(func, [leaf for leaf in tree_leaves((args, kwargs, out)) if torch.is_tensor(leaf)])
        return out

    def _why(self, func: Any, tensors: Sequence[Tensor]) -> str | None:
        if torch.Tag.data_dependent_output in func.tags:
            return f"the host reads the result of {func} within a pass"
        by_number = func is torch.ops.aten.index.Tensor and not any(t.dtype == torch.bool for t in tensors)
        if torch.Tag.dynamic_output_shape in func.tags and not by_number:
            return f"the shape of the result of {func} depends on values"
        elsewhere = {str(tensor.device) for tensor in tensors} - {str(self._device)}
        return f"{func} has a tensor on {', '.join(sorted(elsewhere))}" if elsewhere else None
