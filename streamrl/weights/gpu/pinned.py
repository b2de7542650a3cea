"""Asynchronous copies between a GPU and host memory: through two pinned buffers, on a stream of their own.

Ordinary host memory is reached by a GPU at a tenth of the rate, and only while its default stream waits. While one
buffer is copied by the GPU the other is filled or emptied by the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from streamrl.weights.document import PIECE_BYTES

BUFFER_BYTES = 16 << 20
"""Of each of the two. Larger ones gain nothing over the cost of starting a copy, and pinned memory is scarce."""


def upload(host: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; a GPU fetches it when it comes to that, and the host does not wait.

    It goes through pinned memory of torch's own pool, which gives a block out again once an event says that its copy
    is done. From ordinary memory a copy would wait for all that the GPU was given before.
    """
    if torch.device(device).type != "cuda" or host.is_cuda:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors as bytes in host memory, piece by piece.

    From a GPU they come through two pinned buffers on a stream of their own: while the one is used, the other fills.

    Args:
        through_buffers: also from a CPU, whose memory is otherwise given as it is.
    """

    def __init__(
        self, device: torch.device, *, nbytes: int = BUFFER_BYTES, through_buffers: bool | None = None
    ) -> None:
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._buffers: list[Tensor] = []
        self._nbytes, self._through = nbytes, self._cuda if through_buffers is None else through_buffers

    def stream(self, after: Any = None) -> Any:
        """A context in which tensors are made and copied beside training, after an event of training's stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(after or torch.cuda.current_stream().record_event())
        return torch.cuda.stream(self._stream)

    def pieces(self, parts: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, memoryview]]:
        """(place, bytes) of parts given as (place, one-dimensional tensor); bytes hold until the next is asked for."""
        if not self._through:
            yield from ((start, _bytes_of(piece)) for start, piece in self._cut(parts, PIECE_BYTES))
            return
        if not self._buffers:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        waiting = None
        for number, (start, piece) in enumerate(self._cut(parts, self._nbytes)):
            # The next copy is queued before the last one is handed out, so the GPU never waits for the reader.
            filling = start, *self._fill(self._buffers[number % 2], piece)
            if waiting is not None:
                yield self._filled(*waiting)
            waiting = filling
        if waiting is not None:
            yield self._filled(*waiting)

    @staticmethod
    def _cut(parts: Iterable[tuple[int, Tensor]], nbytes: int) -> Iterator[tuple[int, Tensor]]:
        for start, tensor in parts:
            data = tensor.view(torch.uint8)
            for at in range(0, data.numel(), nbytes):
                yield start + at, data[at : at + nbytes]

    def _fill(self, buffer: Tensor, piece: Tensor) -> tuple[Tensor, Any]:
        target = buffer[: piece.numel()]
        target.copy_(piece, non_blocking=True)
        return target, self._stream.record_event() if self._stream is not None else None

    @staticmethod
    def _filled(start: int, buffer: Tensor, event: Any) -> tuple[int, memoryview]:
        if event is not None:
            event.synchronize()
        return start, _bytes_of(buffer)


def _bytes_of(data: Tensor) -> memoryview:
    return memoryview(data.numpy()).cast("B")


class Upload:
    """Copies tensors of host memory into tensors of a device; any type of numbers into any other.

    Args:
        nbytes: of each buffer.
    """

    def __init__(self, device: torch.device, *, nbytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._nbytes, self._turn = nbytes, 0
        self._buffers: list[Tensor] = []
        self._events: list[Any] = [None, None]

    @torch.no_grad()
    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy; complete after `finish`. A tensor that lies on the device is copied there."""
        if self._stream is None:
            target.copy_(source)
            return
        # What the caller's stream was given until now may still read the target, or write the source.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if source.is_cuda:
                target.copy_(source, non_blocking=True)
                return
            same = target.is_contiguous() and source.dtype == target.dtype
            # Converted on the device: a CPU converts at a fraction of the rate at which the bytes travel.
            there = target if same else torch.empty(source.shape, dtype=source.dtype, device=self._device)
            ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (source, there))
            for start in range(0, ours.numel(), self._nbytes):
                self._copy_piece(ours[start : start + self._nbytes], theirs[start : start + self._nbytes])
            if not same:
                target.copy_(there)

    def _copy_piece(self, ours: Tensor, theirs: Tensor) -> None:
        if not self._buffers:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        turn = self._turn = 1 - self._turn
        if self._events[turn] is not None:
            self._events[turn].synchronize()  # the GPU has read it
        buffer = self._buffers[turn][: ours.numel()]
        buffer.copy_(ours)
        theirs.copy_(buffer, non_blocking=True)
        self._events[turn] = self._stream.record_event()

    def finish(self) -> None:
        """Wait for every copy that was begun."""
        if self._stream is not None:
            self._stream.synchronize()
