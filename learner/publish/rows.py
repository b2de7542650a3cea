"""This rank's part of a document: which of its bytes are the rank's rows, and how they come into the file.

The rows of a tensor that is sharded by rows are consecutive bytes of the document. So every rank of a host writes its
own into the one file and nothing is gathered; then each digests an equal part of the buckets, as they lie in the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.checkpoint.shards import local_box
from learner.ranks.mesh import Ranks, local_part
from streamrl.errors import WeightsError
from streamrl.messages import Layout
from streamrl.weights.document import HEADER_BYTES, PROBE_BYTES, digest_all, unpack_header
from streamrl.weights.gpu.fold128 import DocumentFold
from streamrl.weights.gpu.pinned import Download
from streamrl.weights.manifest import bucket_ranges, tensor_nbytes, tensor_offsets


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Consecutive bytes of the document that this rank holds, from `start` on."""

    start: int
    tensor: Any  # a tensor, or what `full_tensor` makes one
    dtype: torch.dtype  # in the document

    def wire(self) -> Tensor:
        """The part's numbers in the type of the document, one after another, on their device."""
        tensor = self.tensor if isinstance(self.tensor, Tensor) else self.tensor.full_tensor()
        return tensor.detach().to(self.dtype).reshape(-1)


def parts_of(tensors: Sequence[Any], layout: Layout, ranks: Ranks) -> list[Part]:
    """This rank's parts, in the order of the document; of a part that several hold, one's."""
    found = []
    for tensor, (spec, offset) in zip(tensors, tensor_offsets(layout), strict=True):
        if not ranks.owns(tensor):
            continue
        dtype = getattr(torch, spec.dtype)
        if isinstance(tensor, DTensor):
            box, local = local_box(tensor), local_part(tensor.detach())
            if local.numel():
                found.append(Part(offset + box.offset[0] * (tensor_nbytes(spec) // spec.shape[0]), local, dtype))
        else:
            found.append(Part(offset, tensor, dtype))
    return found


def sharded_by_rows(tensors: Sequence[tuple[str, Any]]) -> bool:
    """Whether every tensor that is sharded at all is sharded so that a rank's part is consecutive bytes."""
    placements = [placement for _, one in tensors if isinstance(one, DTensor) for placement in one.placements]
    return all(getattr(placement, "dim", 0) == 0 for placement in placements)


class SharedFile:
    """The file of a document that is being written, open in a rank beside the one that made it.

    Args:
        probe: the random bytes that it begins with.
    Raises:
        OSError: it cannot be seen from here. WeightsError: another file has its name here.
    """

    def __init__(self, path: str | Path, probe: bytes, layout: Layout) -> None:
        self._layout = layout
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found, _, nbytes = unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
        self._size = HEADER_BYTES + nbytes
        if found != probe[:PROBE_BYTES]:
            self.close()
            raise WeightsError(f"{path} is another file here than on rank 0")

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes at a place of the document."""
        while data:
            done = os.pwrite(self._fd, data, HEADER_BYTES + start)
            start, data = start + done, data[done:]

    def digests(self, which: range) -> list[bytes]:
        """Digests of these buckets, as they are in the file now."""
        with mmap.mmap(self._fd, self._size, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as whole:
            ranges = bucket_ranges(self._layout)
            views = [whole[HEADER_BYTES + ranges[i][0] : HEADER_BYTES + ranges[i][1]] for i in which]
            found = digest_all(views)
            for view in views:
                view.release()
        return found

    def close(self) -> None:
        os.close(self._fd)


def write_parts(
    parts: Sequence[Part], file: SharedFile, download: Download, fold: DocumentFold | None
) -> int:
    """Cast, fold and write this rank's parts; returns their bytes. One at a time is held in the document's type."""

    def cast() -> Iterator[tuple[int, Tensor]]:
        for part in parts:
            data = part.wire()
            if fold is not None:
                fold.add(data.view(torch.uint8), part.start)
            yield part.start, data

    nbytes = 0
    for start, data in download.pieces(cast()):
        file.write(start, data)
        nbytes += len(data)
    return nbytes
