"""The model that a run starts from: where it is, in which types it computes and travels."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from learner.model.tiny import prepare_tiny_model
from learner.ranks.mesh import Ranks
from streamrl.config.schema import PolicyConfig, WireDtype
from streamrl.environment import Task
from streamrl.errors import ConfigError

log = logging.getLogger("streamrl.learner")


def model_directory(
    policy: PolicyConfig, task: Task, ranks: Ranks, *, seed: int = 0, num_threads: int = 0,
    max_positions: int | None = None,
) -> Path:
    """The checkpoint to start from; a tiny model is made by rank 0 first.

    Args:
        seed: of a tiny model's weights and warm start.
        num_threads: of its warm start; 0 takes those of torch.
        max_positions: of a tiny model; None takes its default.
    """
    tiny = policy.tiny
    if not tiny.enabled:
        assert policy.model_path is not None
        return Path(policy.model_path)
    more = {} if max_positions is None else {"max_positions": max_positions}
    for rank in range(ranks.mesh.world):
        if rank == ranks.rank:
            path = prepare_tiny_model(
                tiny.cache_dir, task, hidden_size=tiny.hidden_size, num_layers=tiny.num_layers,
                num_heads=tiny.num_heads, num_warm_start_steps=tiny.num_warm_start_steps,
                warm_start_lr=tiny.warm_start_lr, stop_at=tiny.warm_start_until, seed=seed,
                num_threads=num_threads or torch.get_num_threads(), progress=log.info, **more,
            )
        ranks.barrier()
    return path


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where bfloat16 is emulated and very slow; bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"policy.dtype={name} is not a torch dtype: use auto, float32 or bfloat16")
    return dtype


def wire_dtype(choice: WireDtype, device: torch.device) -> torch.dtype:
    if choice is WireDtype.auto:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if choice is WireDtype.float32 else torch.bfloat16
