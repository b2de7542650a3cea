"""Two FSDP2 ranks publish and watch themselves; called by `fsdp_publish`, before anything else takes memory.

Each rank prints one line of JSON: how far its own memory rose meanwhile (the document is shared memory and not
counted), what it wrote, and how many bytes its collectives carried, in which thread.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.model.policy import policy_parameters
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.messages import VersionRef
from streamrl.weights.shm.transport import ShmPublisher

NUM_LAYERS, WIDTH = 24, 1024  # 4 MiB a layer
BUCKET_BYTES = 8 << 20


class Watch(TorchDispatchMode):
    """The bytes of collectives, and the most memory that was held right after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.threads: set[str] = set()
        self.before = self.peak = own_mib()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, own_mib())
        if func.namespace in ("_c10d_functional", "c10d"):
            self.nbytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            self.threads.add(threading.current_thread().name)
        return result


def own_mib() -> float:
    """Memory of this process alone, without mapped files."""
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def measure(folder: Path, ranks: Ranks) -> None:
    mesh, rank = ranks.device_mesh, ranks.rank
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shm = ShmPublisher(folder, "budget") if rank == 0 else None
    publisher = Publisher(
        policy_parameters(model), wire_dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES, shm=shm, ranks=ranks
    )
    publisher.publish(VersionRef(1, 0))  # the first makes buffers for good
    with Watch() as watch:
        publisher.publish(VersionRef(1, 1))
    found = {
        "rank": rank, "extra_mib": watch.peak - watch.before, "written_mib": publisher.num_bytes_written / 2**20,
        "collective_bytes": watch.nbytes, "threads": sorted(watch.threads),
    }
    print("budget", json.dumps(found), flush=True)
    torch.distributed.barrier()
    if shm is not None:
        shm.close()
