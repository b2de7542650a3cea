"""The model that a run starts from: where it is, in which types it computes and travels."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import torch

from learner.data.dialogues import task_dialogues
from learner.model.tiny import prepare_tiny_model, unknown_characters
from learner.ranks.mesh import Ranks
from streamrl.config.schema import PolicyConfig, TinyModelConfig, WireDtype
from streamrl.environment import Task
from streamrl.errors import ConfigError
from streamrl.metrics.files import write_atomic

log = logging.getLogger("streamrl.learner")

START_MODEL = "start_model"
"""In a run's directory: the tiny model that it started from. Another task or seed would make another one."""
SIZES = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
"""Settings of a tiny model, and their names in its configuration."""


def model_directory(
    policy: PolicyConfig, task: Task, ranks: Ranks, *, seed: int = 0, num_threads: int = 0,
    max_positions: int | None = None, run_dir: Path | None = None,
) -> Path:
    """The checkpoint to start from; a tiny model is made by rank 0 first.

    Args:
        run_dir: of a run that has begun: its own tiny model is taken, if it is kept there.
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
        if rank == ranks.rank and run_dir is not None and (run_dir / START_MODEL / "config.json").exists():
            path = run_dir / START_MODEL
            _check_sizes(path, tiny)
        elif rank == ranks.rank:
            path = prepare_tiny_model(
                tiny.cache_dir, task, hidden_size=tiny.hidden_size, num_layers=tiny.num_layers,
                num_heads=tiny.num_heads, num_warm_start_steps=tiny.num_warm_start_steps,
                warm_start_lr=tiny.warm_start_lr, stop_at=tiny.warm_start_until, seed=seed,
                num_threads=num_threads or torch.get_num_threads(), progress=log.info, **more,
            )
        ranks.barrier()
    return path


def keep_tiny_model(path: Path, run_dir: Path, task: Task, ranks: Ranks, *, max_positions: int) -> None:
    """Copy a tiny model into the directory of its run, or see that the one there fits the task; a collective call.

    Raises ConfigError: the task has characters that the run's model has no token for.
    """
    kept = run_dir / START_MODEL
    for rank in range(ranks.mesh.world):
        if rank == ranks.rank and path == kept:
            if unknown := unknown_characters(kept, task_dialogues(task, 512, needs_target=False)):
                raise ConfigError(
                    f"the task has the characters {unknown!r}, and the run's tiny model has tokens for those of the "
                    f"task that it started with alone ({kept}): leave the task as it was, or start a new run"
                )
            _widen(kept, max_positions)
        elif rank == ranks.rank:
            draft = run_dir / f"{START_MODEL}.{os.getpid()}"
            shutil.copytree(path, draft)
            shutil.rmtree(kept, ignore_errors=True)
            os.replace(draft, kept)
        ranks.barrier()


def _check_sizes(path: Path, tiny: TinyModelConfig) -> None:
    found = json.loads((path / "config.json").read_text())
    for name, there in SIZES.items():
        if found[there] != getattr(tiny, name):
            raise ConfigError(
                f"policy.tiny.{name}={getattr(tiny, name)}, and the run started from a tiny model with {found[there]} "
                f"({path}): set policy.tiny.{name}={found[there]}, or start a new run"
            )


def _widen(path: Path, max_positions: int) -> None:
    """Longer sequences need other settings alone: a rotary embedding has no weights."""
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        values = json.loads((path / name).read_text())
        if values[key] < max_positions:
            write_atomic(path / name, json.dumps(values | {key: max_positions}, indent=2) + "\n")


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
