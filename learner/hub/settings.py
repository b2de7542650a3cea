"""What the learner passes to its hub at start-up: one JSON file of plain values, no config objects."""

from __future__ import annotations

from pathlib import Path

import msgspec

from learner.hub.ledger.settings import LedgerSettings
from streamrl.messages import Limits, Lineage, Sampling


class TaskSettings(msgspec.Struct, frozen=True):
    """Where prompts come from."""

    name: str
    path: str | None
    options: dict[str, object]
    shuffle: bool


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the hub process needs before the first version is published."""

    run_id: str
    run_dir: str
    learner_epoch: int
    version: int
    lineage: tuple[Lineage, ...]
    run_seed: int
    dp_ranks: tuple[int, ...]
    """The data-parallel rank of every learner rank: those with the same one train the same groups."""
    bind: str
    weights_port: int
    advertise: str | None
    rank_endpoint: str
    shm_dir: str
    task: TaskSettings
    welcome_task: str
    """JSON for actors, passed on as it is."""
    total_steps: int
    limits: Limits
    sampling: Sampling
    eval_sampling: Sampling
    ledger: LedgerSettings
    zero_std_min: float | None
    trained_scores: tuple[str, ...]
    accuracy_range: tuple[float, float] | None
    keep_until_durable: bool
    num_keep_versions: int
    max_bytes_per_s: int
    delta_max_ratio: float
    probe_tolerance: float
    restore_path: str | None
    transports: tuple[str, ...]
    nccl_init_deadline_s: float
    nccl_bucket_deadline_s: float
    bucket_bytes: int
    device: str
    """Of the learner's rank 0; the broadcaster uses the same."""


class BroadcasterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub passes to its broadcaster process."""

    rank_endpoint: str
    device: str
    transports: tuple[str, ...]
    slot_bytes: int
    init_deadline_s: float
    bucket_deadline_s: float


def write_settings(settings: HubSettings, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2))


def read_settings(path: Path) -> HubSettings:
    return msgspec.json.decode(path.read_bytes(), type=HubSettings)
