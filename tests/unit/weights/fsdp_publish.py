"""Two ranks shard a small model with FSDP2 and publish it; run by test_publisher under torchrun. argv: directory."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch.distributed.fsdp import fully_shard

import learner.publish.publisher as publisher_module
from learner.model.policy import policy_tensors
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Mesh, Ranks
from streamrl.errors import WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.shm.transport import ShmPublisher
from tests.unit.weights.fsdp_budget import measure


def toy_model() -> torch.nn.Module:
    """Sizes that two ranks cannot share evenly, and buffers of several types."""
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Embedding(13, 5), torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1, bias=False)
    )
    model[1].register_buffer("correction", torch.tensor([1.0 + 2**-20, -3.0]))
    model[1].register_buffer("frequencies", torch.rand(3), persistent=False)
    model[2].register_buffer("hidden", torch.tensor([True, False, True]))
    model[2].register_buffer("count", torch.tensor(2**40 + 1))
    return model


def publish_all(model: torch.nn.Module, folder: Path, ranks: Ranks, *, way: str) -> None:
    """Three versions, the last of which must fail; prints the manifests of the others.

    rows      every rank writes its own
    gather    rank 1 does not see the file, as on another host
    snapshot  rows, of a copy: the weights change before it is written
    no-room   rows, because rank 1 has no memory for a copy; the version can still be published
    broken    rows, and it is rank 1 that cannot write the last version
    """
    shm = ShmPublisher(folder / way, "fsdp", keep_versions=9) if ranks.rank == 0 else None
    publisher = Publisher(
        policy_tensors(model), wire_dtype=torch.bfloat16, bucket_bytes=64, shm=shm, ranks=ranks, fold=True
    )
    beside = ranks.background_group()
    for version in range(3):
        if version == 2 and way == "broken" and ranks.rank == 1:
            publisher_module.SharedFile.write = no_room
        elif version == 2 and way != "broken" and shm is not None:
            shm.close()  # rank 0 can write no more: the others must get through their part all the same
        ref = VersionRef(1, version)
        work = publisher.snapshot(ref) if way in ("snapshot", "no-room") and version else None
        assert (work is not None) == (way == "snapshot" and version > 0), way
        if work is not None:
            change(model, 1.5)
        try:
            published = publisher.publish(ref) if work is None else work(beside)
        except WeightsError as error:
            assert ranks.rank == 0 and version == 2, error
            print(way, "abandoned", flush=True)
        else:
            assert (published is None) == (ranks.rank != 0)
            if published is not None:
                both = published.manifest, published.device_manifest
                print(way, msgspec.msgpack.encode(both).hex(), flush=True)
        if work is None:
            change(model, 1.5)


def fake_allocator_without_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def not_here(*_: object) -> None:
    raise FileNotFoundError(2, "No such file or directory")


@torch.no_grad()
def change(model: torch.nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        parameter.mul_(factor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mesh = Mesh.from_world_size(2).on_devices("cpu")
    ranks = Ranks(mesh.get_rank(), Mesh.from_world_size(2), torch.device("cpu"), mesh)
    measure(Path(sys.argv[1]) / "budget", ranks)
    here, copied = publisher_module.SharedFile, publisher_module._copied
    for way in ("rows", "gather", "snapshot", "no-room", "broken"):
        model = toy_model()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        publisher_module.SharedFile = not_here if way == "gather" and ranks.rank == 1 else here
        no_memory = way == "no-room" and ranks.rank == 1
        publisher_module._copied = fake_allocator_without_memory if no_memory else copied
        publish_all(model, Path(sys.argv[1]), ranks, way=way)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
