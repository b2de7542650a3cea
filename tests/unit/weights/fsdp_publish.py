"""Two ranks shard a small model with FSDP2 and publish it; run by test_publisher under torchrun. argv: directory."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from learner.publish.publisher import Publisher, policy_parameters
from streamrl.messages import VersionRef
from streamrl.weights.shm.transport import ShmPublisher


def toy_model() -> torch.nn.Module:
    """Sizes that two ranks cannot share evenly."""
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Embedding(13, 5), torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1, bias=False)
    )


def publish_all(model: torch.nn.Module, folder: Path, *, rank: int, full_at: int | None) -> None:
    shm = ShmPublisher(folder, "fsdp", keep_versions=9) if rank == 0 else None
    publisher = Publisher(
        policy_parameters(model), wire_dtype=torch.bfloat16, bucket_bytes=64, shm=shm, rank=rank
    )
    for version in range(3):
        if version == full_at and shm is not None:
            shm.close()  # rank 0 can write no more: the others must get through their gathers all the same
        try:
            published = publisher.publish(VersionRef(1, version))
        except Exception as error:
            assert rank == 0 and version == full_at, error
            print("abandoned", flush=True)
        else:
            assert (published is None) == (rank != 0)
            if published is not None:
                print(msgspec.msgpack.encode(published.manifest).hex(), flush=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    model = toy_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    publish_all(model, Path(sys.argv[1]), rank=mesh.get_rank(), full_at=2)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
