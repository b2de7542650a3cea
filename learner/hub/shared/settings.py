"""Settings that the learner passes to its hub at start-up, and the hub to its broadcaster: one JSON file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from learner.hub.ledger.tables.settings import LedgerSettings
from streamrl.config.schema import (
    DataConfig,
    EnvConfig,
    FilterConfig,
    HubConfig,
    PublishConfig,
    RewardConfig,
    TrustConfig,
)
from streamrl.messages import Limits, Lineage, Sampling


class EvalSetSettings(msgspec.Struct, frozen=True):
    """An entry of `eval.datasets`: its records, their environment, and how answers are drawn."""

    name: str
    env: EnvConfig
    data: DataConfig
    reward: RewardConfig
    sampling: Sampling


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the hub process needs before the first version is published."""

    run_id: str
    run_dir: str
    learner_epoch: int
    version: int
    lineage: tuple[Lineage, ...]
    run_seed: int
    dp_ranks: tuple[int, ...]
    """The data-parallel rank of every learner rank: those with the same one train the same groups."""
    bind: str
    """As `hub.bind`, or the predecessor's address after a resume."""
    rank_endpoint: str
    shm_dir: str
    env: EnvConfig
    data: DataConfig
    reward: RewardConfig
    welcome_task: str
    """JSON for actors, passed on as it is."""
    total_steps: int
    limits: Limits
    sampling: Sampling
    eval_sampling: Sampling
    eval_sets: tuple[EvalSetSettings, ...]
    ledger: LedgerSettings
    filter: FilterConfig
    trained_scores: tuple[str, ...]
    hub: HubConfig
    publish: PublishConfig
    trust: TrustConfig
    keep_until_durable: bool
    restore_path: str | None
    device: str
    """Of the learner's rank 0; the broadcaster uses the same."""
    num_minibatches: int = 1
    """Equal parts of a batch, each with an optimizer step of its own."""
    rank_silent_s: float = 20.0


def write_settings(settings: HubSettings, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2))


def read_settings(path: Path) -> HubSettings:
    return msgspec.json.decode(path.read_bytes(), type=HubSettings)
