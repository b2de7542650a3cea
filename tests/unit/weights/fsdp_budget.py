"""Two FSDP2 ranks publish and watch themselves; run by test_publisher under torchrun. argv: directory.

Each rank prints one line of JSON: how far its own memory rose while it gathered (the document is shared memory and
not counted), and which collectives it ran, in which thread.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from learner.publish.publisher import Publisher, policy_parameters
from streamrl.messages import VersionRef
from streamrl.weights.shm.transport import ShmPublisher

NUM_LAYERS, WIDTH = 24, 1024  # 4 MiB a layer
BUCKET_BYTES = 8 << 20


class Watch(TorchDispatchMode):
    """Every collective that passes, and the most memory that was held right after one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.threads: set[str] = set()
        self.before = self.peak = own_mib()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, own_mib())
        if func.namespace in ("_c10d_functional", "c10d"):
            self.seen.append(f"{func.__name__}{list(args[0].shape)}")
            self.threads.add(threading.current_thread().name)
        return result


def own_mib() -> float:
    """Memory of this process alone, without mapped files."""
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def main() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank = mesh.get_rank()
    shm = ShmPublisher(Path(sys.argv[1]), "budget") if rank == 0 else None
    publisher = Publisher(
        policy_parameters(model), wire_dtype=torch.float32, bucket_bytes=BUCKET_BYTES, shm=shm, rank=rank
    )
    publisher.publish(VersionRef(1, 0))  # the first gathers make buffers for good
    with Watch() as watch:
        publisher.publish(VersionRef(1, 1))
    found = {"rank": rank, "extra_mib": watch.peak - watch.before, "seen": watch.seen, "threads": sorted(watch.threads)}
    print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    if shm is not None:
        shm.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
