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
    StreamConfig,
    TrustConfig,
)
from streamrl.messages import Limits, Lineage, Sampling
from streamrl.stream.records import RunStarted


class EvalSetSettings(msgspec.Struct, frozen=True):
    """An entry of `eval.datasets`: its records, their environment, and how answers are drawn."""

    name: str
    env: EnvConfig
    data: DataConfig
    reward: RewardConfig
    sampling: Sampling


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the hub process needs before the first version is published."""

    started: RunStarted
    """The log's record of this start: the run's id, the epoch, and the version that it begins with."""
    run_dir: str
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
    stream: StreamConfig
    restore_path: str | None
    device: str
    """Of the learner's rank 0; the broadcaster uses the same."""
    num_minibatches: int = 1
    """Equal parts of a batch, each with an optimizer step of its own."""
    rank_silent_s: float = 20.0
    by_turns: bool = False
    """`launch.share_gpus=turns`."""

    @property
    def run_id(self) -> str:
        return self.started.run_id

    @property
    def learner_epoch(self) -> int:
        return self.started.learner_epoch


def write_settings(settings: HubSettings, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2))


def read_settings(path: Path) -> HubSettings:
    return msgspec.json.decode(path.read_bytes(), type=HubSettings)
