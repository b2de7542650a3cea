"""What the equality of two trainings, bit by bit, depends on beside settings and data."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch
import xxhash

from learner.ranks.mesh import Ranks

PACKAGES = ("torch", "transformers", "numpy", "msgspec", "safetensors")


def environment(ranks: Ranks) -> dict[str, str]:
    """Versions, the build of torch, threads, ranks and device, each in words."""
    return {
        "python": platform.python_version(), **{name: version(name) for name in PACKAGES},
        "machine": platform.machine(), "torch_build": xxhash.xxh3_64_hexdigest(torch.__config__.show().encode()),
        "threads": str(torch.get_num_threads()), "ranks": str(ranks.mesh.world), "device": ranks.device.type,
    }
