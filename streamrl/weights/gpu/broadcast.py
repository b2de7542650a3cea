"""Weights by broadcast: rank 0.

A broadcast of a version is a header (which version this is), then its buckets in layout order. The receiving
ranks are in `broadcast_member`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from streamrl.errors import WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.gpu.communicator import CommunicatorError, GuardedCommunicator, Threads
from streamrl.weights.gpu.device_document import HostBuckets
from streamrl.weights.gpu.nccl import CupyNccl
from streamrl.weights.manifest import bucket_ranges

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"SRLB"
HEADER_BYTES = _HEADER.size
GRACE_S = 5.0
"""How much longer than the hub a rank waits for the other ranks."""


class Broadcaster:
    """Rank 0 of one epoch at a time. Call its methods from one thread, `stop` from any."""

    def __init__(self, library: CupyNccl, device: str | torch.device) -> None:
        self.threads = Threads()
        self._library, self._device = library, torch.device(device)
        self._guard: GuardedCommunicator | None = None
        self._slots: list[torch.Tensor] = []
        self._filler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fill")

    def name(self) -> bytes:
        """A unique id for the next epoch."""
        return self._library.unique_id()

    def form(self, epoch: int, world: int, unique_id: bytes, deadline_s: float) -> None:
        """Raises CommunicatorError or CommunicatorStuck."""
        self.close()
        self._guard = GuardedCommunicator(
            self._library, self.threads, rank=0, world=world, unique_id=unique_id, what=f"epoch {epoch} as rank 0"
        )
        self._guard.form(deadline_s)

    def send(
        self, ref: VersionRef, source: HostBuckets, *, deadline_s: float, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Broadcast a version; while one bucket travels the next is fetched.

        Args:
            deadline_s: for each bucket.
            progress: called after each.
        Raises:
            CommunicatorError, CommunicatorStuck: the epoch is dead.
        """
        guard = self._guard
        if guard is None:
            raise CommunicatorError("send() before form(): there is no communicator")
        ranges = bucket_ranges(source.layout)
        slots = self._two_slots(max(source.layout.bucket_bytes))
        # Members learn from the header which of the versions they were invited to comes.
        guard.broadcast(pack_header(ref, self._device), deadline_s)
        # One bucket is read while the one before travels; a third buffer would only cost memory.
        filling = self._filler.submit(source.fill, 0, slots[0])
        for index, (start, end) in enumerate(ranges):
            filling.result()
            if index + 1 < len(ranges):
                filling = self._filler.submit(source.fill, index + 1, slots[(index + 1) % 2])
            guard.broadcast(slots[index % 2][: end - start], deadline_s)
            progress()

    def stop(self) -> None:
        """End what is in progress, from another thread."""
        if (guard := self._guard) is not None:
            guard.stop()

    def close(self) -> None:
        """Leave the present epoch."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def _two_slots(self, nbytes: int) -> list[torch.Tensor]:
        if not self._slots or self._slots[0].numel() < nbytes:
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return self._slots


def pack_header(ref: VersionRef, device: torch.device) -> torch.Tensor:
    raw = bytearray(_HEADER.pack(_MAGIC, ref.learner_epoch, ref.version))
    return torch.frombuffer(raw, dtype=torch.uint8).to(device)


def unpack_header(header: torch.Tensor) -> VersionRef:
    magic, learner_epoch, version = _HEADER.unpack(header.cpu().numpy().tobytes())
    if magic != _MAGIC:
        raise WeightsError(f"a broadcast begins with {_MAGIC!r}, this one with {magic!r}")
    return VersionRef(learner_epoch, version)
