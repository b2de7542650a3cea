"""An actor's part in the GPU transports: its membership in broadcasts and its view of IPC buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from streamrl.messages import Layout, Manifest, NcclState, Offer
from streamrl.weights.gpu.broadcast import BroadcastMember, BroadcastReceiver
from streamrl.weights.gpu.cuda_memory import CudaMemory, device_id
from streamrl.weights.gpu.ipc import IpcBufferReader, IpcBufferReceiver
from streamrl.weights.gpu.nccl import CupyNccl
from streamrl.weights.manifest import document_nbytes
from streamrl.weights.transport import ReceiverFactory


class DeviceWeights:
    """The per-process state of all fetches by ipc and nccl; other transports are ignored.

    Raises:
        ConfigError: a transport that cannot work here: no GPU, no cupy, no NCCL.
    """

    def __init__(
        self, transports: Sequence[str], device: str, context: zmq.Context, *,
        library: Callable[[str], CupyNccl] = CupyNccl, memory: Callable[[str], CudaMemory] = CudaMemory,
    ) -> None:
        self.report: Callable[[NcclState], None] = lambda state: None
        """Called for each communicator that is built, formed or lost; the client sets it."""
        self.device_id = device_id(device)
        self._member: BroadcastMember | None = None
        self._reader: IpcBufferReader | None = None
        if "ipc" in transports:
            slots = memory(device)
            self.device_id, self._reader = slots.device_id, IpcBufferReader(slots, context)
        if "nccl" in transports:
            self._member = BroadcastMember(library(device), device, lambda state: self.report(state))

    @property
    def factories(self) -> dict[str, ReceiverFactory]:
        found: dict[str, ReceiverFactory] = {}
        if (reader := self._reader) is not None:
            found["ipc"] = lambda offer: IpcBufferReceiver(offer, reader)
        if (member := self._member) is not None:
            found["nccl"] = lambda offer: BroadcastReceiver(offer, member)
        return found

    @property
    def num_abandoned_threads(self) -> int:
        return self._member.threads.num_abandoned if self._member is not None else 0

    def hear(self, manifest: Manifest, offers: Sequence[Offer], layout: Layout) -> None:
        """An announcement: take part in its broadcast, if any, whether or not the installer wants the version."""
        if self._member is None:
            return
        self._member.expect(document_nbytes(layout))
        for offer in offers:
            if offer.nccl is not None and offer.manifest is not None:
                self._member.invite(offer.manifest, layout, offer.nccl)
                return
        self._member.uninvite(manifest.ref)

    def close(self) -> None:
        """Leave the communicator; may be called twice."""
        if self._member is not None:
            self._member.close()
