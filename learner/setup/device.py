"""The device of a learner process, the group of all of them, and the environment that they compute in."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import xxhash

from learner.ranks.mesh import Ranks
from streamrl.config.schema import LearnerConfig, RunConfig
from streamrl.process_memory import keep_freed_memory

log = logging.getLogger("streamrl.learner")

PACKAGES = ("torch", "transformers", "numpy", "msgspec", "safetensors")


def start_ranks(run: RunConfig, learner: LearnerConfig) -> Ranks:
    """Join the other learner processes, if there are any."""
    ranks = Ranks.start(run.device, timeout_s=learner.rank_timeout_s, axes=vars(learner.mesh))
    limit_gpu_memory(learner.gpu_memory_share, ranks.device)
    if ranks.device.type == "cpu":
        keep_freed_memory()
        if run.num_threads:
            torch.set_num_threads(run.num_threads)
    return ranks


def limit_gpu_memory(share: float | None, device: torch.device) -> None:
    """Keep to this part of the GPU, and tell that it does nothing where there is none."""
    if device.type == "cuda" and share is not None:
        torch.cuda.set_per_process_memory_fraction(share, device)
    elif share is not None:
        log.warning("learner.gpu_memory_share=%g only divides a GPU's memory, and the learner is on a CPU", share)


def agreed_run_dir(
    choose: Callable[[], Path], numbered: Callable[[int], Path], named: str | None, ranks: Ranks
) -> Path:
    """Rank 0 counts up to the next free number; the others take the same, though they start at the same moment."""
    chosen = choose() if ranks.rank == 0 else None
    if named is not None:
        return Path(named)
    return numbered(int(ranks.from_rank_zero(float(chosen.name.rpartition("-")[2]) if chosen is not None else 0.0)))


def environment(ranks: Ranks) -> dict[str, str]:
    """Conditions on which two trainings are equal bit by bit, apart from settings and data, each in words."""
    return {
        "python": platform.python_version(), **{name: version(name) for name in PACKAGES},
        "machine": platform.machine(), "torch_build": xxhash.xxh3_64_hexdigest(torch.__config__.show().encode()),
        "threads": str(torch.get_num_threads()), "ranks": str(ranks.mesh.world), "device": ranks.device.type,
    }
