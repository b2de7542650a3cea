"""python -m learner.broadcaster SETTINGS: started by the hub where weights go from GPU to GPU, ends with it."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
from pathlib import Path

import torch
import zmq

from learner.broadcaster.service import BroadcasterService
from learner.hub.context.broadcaster_process import EXIT_NO_MEMORY
from learner.hub.context.settings import HubSettings, read_settings
from streamrl.commands import exit_at_once
from streamrl.errors import StreamrlError
from streamrl.messages.printable import start_log
from streamrl.parent_watch import watch
from streamrl.transport.keys import RankKeys
from streamrl.transport.sockets import socket_root
from streamrl.weights.gpu.broadcast import Broadcaster
from streamrl.weights.gpu.cuda_memory import CudaMemory, device_id
from streamrl.weights.gpu.ipc import IpcBufferServer
from streamrl.weights.gpu.nccl import CupyNccl


def serve(settings: HubSettings, home: str) -> int:
    """Build what the settings ask for on the GPU, and serve."""
    parent_gone: list[bool] = []
    watch(lambda: parent_gone.append(True))
    publish, context = settings.publish, zmq.Context()
    torch.cuda.set_device(torch.device(settings.device))
    broadcaster = slots = None
    if "nccl" in publish.transports:
        broadcaster = Broadcaster(CupyNccl(settings.device), settings.device)
    if "ipc" in publish.transports:
        slots = IpcBufferServer(
            CudaMemory(settings.device), context, f"ipc://{home}/slots", slot_bytes=publish.bucket_bytes,
            deadline_s=publish.nccl_bucket_deadline_s,
        )
    keys = RankKeys.from_environment()
    service = BroadcasterService(
        context, settings.rank_endpoint, broadcaster=broadcaster, slots=slots,
        init_deadline_s=publish.nccl_init_deadline_s, bucket_deadline_s=publish.nccl_bucket_deadline_s, pinned=True,
        device=device_id(settings.device),
        key=keys.key if keys is not None else None,
    )
    return service.run(lambda: bool(parent_gone))


def main() -> int:
    start_log("broadcaster")
    for number in (signal.SIGINT, signal.SIGTERM):  # the hub decides
        signal.signal(number, signal.SIG_IGN)
    settings = read_settings(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="streamrl-slots-", dir=socket_root()) as home:
        try:
            return serve(settings, home)
        except torch.OutOfMemoryError as error:
            logging.getLogger("streamrl.broadcaster").error("the GPU has no memory left: %s", error)
            return EXIT_NO_MEMORY
        except StreamrlError as error:
            logging.getLogger("streamrl.broadcaster").error("%s", error)
            return 2


if __name__ == "__main__":
    exit_at_once(main())
