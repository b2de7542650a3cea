"""What a learner does in the tests of the mesh: four ranks under torchrun, or called in the test's own process for one.

    argv: directory, axes as `replicate=2`
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from learner.model.policy import load_policy
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.messages import VersionRef
from streamrl.weights.shm.transport import ShmPublisher
from tests.unit.learner import two_ranks

FAMILIES = ("qwen3", "llama")
MORE = ("mistral", "gemma3_text", "phi3", "olmo2")
"""Families with other masks, and whose plans for the tensor axis have other styles; one step of each."""


def families(axes: Collection[str]) -> tuple[str, ...]:
    """Name the families that go all the way in a layout: the first alone where it has context or tensor only."""
    return FAMILIES[:1] if len({"context", "tensor"} & set(axes)) == 1 else FAMILIES


@contextmanager
def in_float32() -> Iterator[None]:
    """Inside, Muon orthogonalizes in float32: in bfloat16 sums in another order differ by percents of a step."""
    cast, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, torch.Tensor.float
    yield
    torch.Tensor.bfloat16 = cast


def publish(work: Path, folder: Path, ranks: Ranks) -> None:
    """The digests of the starting weights as they are published."""
    named = list(load_policy(work / "model", ranks=ranks).model.named_parameters())
    rows = [(name, parameter) for name, parameter in named if "o_proj" not in name and "down_proj" not in name]
    found = []
    for part in (named, rows):  # on a tensor axis the others are divided by columns
        shm = ShmPublisher(folder / f"documents-{len(part)}", "ranks", keep_versions=2) if ranks.rank == 0 else None
        publisher = Publisher(part, wire_dtype=torch.bfloat16, bucket_bytes=512, shm=shm, ranks=ranks)
        assert publisher.gathers == (ranks.mesh.tensor > 1 and part is named), "each rank writes its own rows"
        published = publisher.publish(VersionRef(1, 0))
        if published is not None and shm is not None:
            found += [digest.hex() for digest in published.manifest.digests]
            shm.close()
    if ranks.rank == 0:
        (folder / "digests").write_text("\n".join(found))


def run(folder: Path, where: str, ranks: Ranks, *, axes: Collection[str] = (), resumes: str = "") -> None:
    """All of it into directories of each family; `resumes` names those with the checkpoints to go on from."""
    for family in families(axes):
        work, mine = folder / family, folder / family / where
        two_ranks.train(work, mine, ranks)
        publish(work, mine, ranks)
        two_ranks.train(work, mine / "lora", ranks, two_ranks.LORA)
        if resumes:
            two_ranks.resume(work, mine / "resumed", ranks, run=work / resumes / "run")
            two_ranks.resume(work, mine / "own", ranks, run=mine / "run")
            lora = work / resumes / "lora" / "run"
            two_ranks.resume(work, mine / "lora-resumed", ranks, run=lora, lora=two_ranks.LORA)
        if family == FAMILIES[0]:
            with in_float32():
                two_ranks.muon(work, mine / "muon", ranks)
            two_ranks.train(work, mine / "eight", ranks, name="adam8bit")
            if resumes:
                run = work / resumes / "eight" / "run"
                two_ranks.resume(work, mine / "eight-resumed", ranks, run=run, name="adam8bit")
            two_ranks.minibatches(work, mine / "minibatches", ranks, once=bool(resumes))
            two_ranks.valued(work, mine / "valued", ranks)


def steps(folder: Path, where: str, ranks: Ranks) -> None:
    """One step of the other families, and with an adapter."""
    for family in MORE:
        for name, lora in ((where, None), (f"{where}/lora", two_ranks.LORA)):
            kit = two_ranks.start(folder / family, ranks, lora=lora)
            first = two_ranks.train_step(kit, ranks, step=0)
            two_ranks.write(folder / family / name, kit.policy, ranks, first)


def main(folder: Path, where: str, axes: Mapping[str, int]) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.start("cpu", timeout_s=60, axes=axes)
    groups = [*ranks.device_mesh.get_all_groups(), *[ranks.context] * (ranks.mesh.context > 1)]
    waits = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    assert waits == {60.0}, "collectives along an axis wait no longer than others"
    run(folder, where, ranks, axes=axes, resumes="one")
    if {"context", "tensor"} <= axes.keys():
        steps(folder, where, ranks)
    ranks.close()


if __name__ == "__main__":
    named = [word.split("=") for word in sys.argv[3:]]
    main(Path(sys.argv[1]), sys.argv[2], {axis: int(size) for axis, size in named})
