"""The transports from GPU to GPU, for the table of transports; torch is imported only where a GPU is asked for."""

from __future__ import annotations

from streamrl.weights.transport import Transport


def _require_ipc(device: str) -> None:
    from streamrl.weights.gpu.cuda_memory import require_ipc

    require_ipc(device)


def _require_nccl(device: str) -> None:
    from streamrl.weights.gpu.nccl import require_nccl

    require_nccl(device)


# No `receiver`: an actor keeps its communicator and its view of the buffers from one fetch to the next.
IPC = Transport(require=_require_ipc)
NCCL = Transport(require=_require_nccl)
