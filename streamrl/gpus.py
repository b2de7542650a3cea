"""The GPUs of this machine, read without torch, and who gets which: a pure plan over what was read.

`nvidia-smi` is asked, never a CUDA library: a process that only supervises must not open a context on a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEARNER_SHARE = 0.5
"""Of a GPU that actors share with a learner rank, unless `learner.gpu_memory_share` says otherwise."""
_QUERY_S = 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver lists it; memory in bytes, 0 where the driver tells none."""

    index: str
    uuid: str = ""
    total_bytes: int = 0
    free_bytes: int = 0


def read_gpus() -> list[Gpu]:
    """The GPUs that the driver lists, whatever CUDA_VISIBLE_DEVICES says; none without nvidia-smi."""
    return parse_gpus(_asked("--query-gpu=index,uuid,memory.total,memory.free"))


def gpu_use(environment: Mapping[str, str]) -> tuple[float, float]:
    """(percent busy, bytes used), of the GPUs that this process may use the largest; zeros where there are none."""
    names = visible_gpus(environment)
    listing = _asked(f"--id={','.join(names)}", "--query-gpu=utilization.gpu,memory.used") if names else ""
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    numbers = [[float(field) if field.isdigit() else 0.0 for field in row] for row in rows if len(row) == 2]
    return max((one[0] for one in numbers), default=0.0), max((one[1] for one in numbers), default=0.0) * (1 << 20)


def gpu_names(environment: Mapping[str, str]) -> str:
    """The GPUs that this process may use, as `1 NVIDIA H100 80GB HBM3`."""
    names = visible_gpus(environment)
    kinds = Counter(_asked(f"--id={','.join(names)}", "--query-gpu=name").splitlines())
    return " and ".join(f"{count} {kind}" for kind, count in kinds.items()) or f"{len(names)} GPUs"


def _asked(*words: str) -> str:
    """The lines that nvidia-smi prints; "" without it, or where it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", *words, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_gpus(listing: str) -> list[Gpu]:
    """Lines `0, GPU-8c5f..., 143771, 143000` (MiB) of nvidia-smi; a number that it cannot tell is 0."""
    found = []
    for line in listing.splitlines():
        index, *rest = (field.strip() for field in line.split(","))
        if not index.isdigit() or len(rest) != 3:
            continue
        total, free = (int(field) << 20 if field.isdigit() else 0 for field in rest[1:])
        found.append(Gpu(index, rest[0], total, free))
    return found


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    listed = environment.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() and name.strip() != "-1"]
    return [gpu.index for gpu in read_gpus()]


def usable_gpus(environment: Mapping[str, str]) -> list[str]:
    """The same, and none where the driver lists no GPU, whatever CUDA_VISIBLE_DEVICES says."""
    names = visible_gpus(environment)
    return names if environment.get(VISIBLE) is None or (names and read_gpus()) else []


def gpu_of(device: str, environment: Mapping[str, str] | None = None) -> Gpu | None:
    """The GPU that torch calls "cuda" or "cuda:N" here; None for a CPU, or where the driver does not list it."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    environment = os.environ if environment is None else environment
    known, names = read_gpus(), visible_gpus(environment)
    place = int(number or 0)
    if place >= len(names):
        return None
    return next((gpu for gpu in known if gpu.index == names[place] or gpu.uuid.startswith(names[place])), None)


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of each process: names for CUDA_VISIBLE_DEVICES; empty leaves a process as it is.

    `learner_share` and `actor_shares`: the part of its GPUs' memory that each plans with; None is all of it.
    """

    learner: tuple[str, ...] = ()
    actors: tuple[tuple[str, ...], ...] = ()
    learner_share: float | None = None
    actor_shares: tuple[float | None, ...] = ()

    @property
    def is_shared(self) -> bool:
        return self.learner_share is not None or any(share is not None for share in self.actor_shares)

    def __str__(self) -> str:
        """Format the placement for the terminal."""
        parts = [f"learner {','.join(self.learner)}"] if self.learner else []
        parts += [f"actor-{number} {','.join(own)}" for number, own in enumerate(self.actors) if own]
        return "GPUs: " + ", ".join(parts) + (" (shared)" if self.is_shared else "")


def environment_for(gpus: Sequence[str]) -> dict[str, str]:
    """The environment variables of a process that computes on these GPUs; none without GPUs."""
    return {VISIBLE: ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}  # the order of nvidia-smi


def place(
    gpus: Sequence[str], *, num_ranks: int, num_actors: int, per_actor: int, share: bool,
    learner_share: float | None = None, actor_share: float | None = None, by_turns: bool = False,
) -> Placement:
    """Deal `gpus`: one to each learner rank, then `per_actor` to each actor; in turn where too few are left.

    Args:
        num_ranks: ranks that compute on a GPU. per_actor: GPUs of one engine. Either may be 0.
        share: whether a GPU may serve more than one process.
        by_turns: a learner and its actors have a GPU one after the other, each side all of it.
        learner_share, actor_share: `learner.gpu_memory_share`, `actors.gpu_memory_share`; None is for us to find.
    Raises:
        ConfigError: too few GPUs, or shares of one GPU that exceed it.
    """
    num_actors = num_actors if per_actor else 0
    learner, rest = tuple(gpus[:num_ranks]), tuple(gpus[num_ranks:])
    needed = num_ranks + num_actors * per_actor
    if needed > len(gpus) and (not share or max(num_ranks, per_actor) > len(gpus)):
        raise ConfigError(
            f"{num_ranks} learner ranks and {num_actors} actors with {per_actor} GPUs each need {needed} GPUs, and "
            f"{len(gpus)} are visible here: lower launch.num_actors or launch.num_learner_ranks, set "
            "actors.device=cpu, or launch.share_gpus=true (ranks never share with each other)"
        )
    pool = rest if len(rest) >= per_actor else tuple(gpus)
    actors = tuple(
        tuple(pool[(number * per_actor + k) % len(pool)] for k in range(per_actor)) for number in range(num_actors)
    )
    engines_on = Counter(gpu for own in actors for gpu in own)
    if learner_share is None and engines_on.keys() & set(learner) and not by_turns:
        learner_share = LEARNER_SHARE
    left = {gpu: 1.0 - (learner_share or 1.0) * (gpu in learner and not by_turns) for gpu in gpus}
    shares = []
    for own in actors:
        found = actor_share if actor_share is not None else min(left[gpu] / engines_on[gpu] for gpu in own)
        for gpu in own:
            if found <= 0 or found * engines_on[gpu] > left[gpu] + 1e-9:
                raise ConfigError(
                    f"GPU {gpu} is promised more than its memory: learner.gpu_memory_share={learner_share} and "
                    f"{engines_on[gpu]} actors with actors.gpu_memory_share={actor_share}; lower one of them"
                )
        shares.append(None if found == 1.0 else found)
    return Placement(learner, actors, learner_share, tuple(shares))
