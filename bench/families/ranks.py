"""Two ranks go the learner's part of the way: they must publish the same bytes, and train to the same weights."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.families.steps import BUCKET_BYTES, LORA, V1, V2, adapt, packed_logprobs, train
from learner.checkpoint.shards import reshard
from learner.data.trajectories import Trajectory
from learner.model.policy import load_policy, policy_tensors
from learner.publish.export import export_model
from learner.publish.publisher import Publisher, publish_base
from learner.ranks.mesh import Ranks
from streamrl.weights.shm.transport import ShmPublisher

WORLD = 2


@dataclass(frozen=True, slots=True)
class Task:
    """The work of both ranks, on a model that one rank has trained already."""

    folder: Path
    work: Path
    rows: Sequence[Tensor]
    batch: Sequence[Trajectory]
    lora: bool


def run_ranks(task: Task) -> dict[str, Any]:
    """Fork the ranks, which have all that this process imported; what rank 0 found. RuntimeError if one fails."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    children = []
    for rank in range(WORLD):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                _rank(rank, port, task)
                code = 0
            except BaseException:
                (task.work / f"rank-{rank}.error").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if any(codes):
        texts = [path.read_text() for path in sorted(task.work.glob("rank-*.error"))]
        raise RuntimeError(f"two ranks ended with {codes}: {' / '.join(text.strip()[-600:] for text in texts)}")
    return json.loads((task.work / "ranks.json").read_text())


def _rank(rank: int, port: int, task: Task) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks, found = Ranks.start("cpu", timeout_s=60), {}
    shm = ShmPublisher(task.work / "two", "families") if rank == 0 else None
    options = {"wire_dtype": torch.float32, "bucket_bytes": BUCKET_BYTES, "shm": shm, "ranks": ranks}
    policy = load_policy(task.folder, ranks=ranks)
    publisher = Publisher(policy_tensors(policy.model), **options)
    first = publisher.publish(V1)
    with torch.no_grad():
        found["logprobs"] = packed_logprobs(policy, task.rows).tolist()
    reshard(policy)  # no backward pass has freed what was gathered for that one
    train(policy, task.batch, ranks)
    publisher.publish(V2)
    export_model(policy, task.folder, task.work / "of-two", ranks)
    half = load_policy(task.folder, ranks=ranks, dtype=torch.bfloat16)
    with torch.no_grad():
        found["half"] = packed_logprobs(half, task.rows).tolist()
    if task.lora:
        adapted = load_policy(task.folder, ranks=ranks, adapt=partial(adapt, seed=7))
        base = publish_base(adapted, LORA, **options)
        train(adapted, task.batch, ranks)
        export_model(adapted, task.folder, task.work / "adapted-of-two", ranks, lora=LORA)
        found["base"] = base[0].manifest.root.hex() if base else ""
    if rank == 0:
        found["root"] = first.manifest.root.hex()
        (task.work / "ranks.json").write_text(json.dumps(found))
    ranks.close()
    if shm is not None:
        shm.close()
