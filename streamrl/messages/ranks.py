"""Between learner ranks and the hub: batches, checkpoints, publishing, evaluations."""

from __future__ import annotations

from streamrl.messages.base import U16, U32, U64, Message, Text, Word
from streamrl.messages.weights import Layout, Manifest


class RankReady(Message):
    """Kind 32, rank -> hub: this rank is up. All ranks of a gang before the first Take."""

    rank: U16
    world: U16
    version: U64


class BatchRequest(Message):
    """Kind 33, rank -> hub: my share of the batch trained at this version. The first Take cuts for all ranks."""

    rank: U16
    version: U64


class PlanRow(Message):
    """What every rank must know about one member of the batch, wherever it is trained."""

    group_id: U64
    index: U16
    rank: U16
    num_tokens: U32
    num_action_tokens: U32
    reward: float
    head_lag: int


class BatchShare(Message):
    """Kind 34, hub -> rank: the GROUP frames (preamble included) of this rank's groups, and the global plan."""

    version: U64
    plan: tuple[PlanRow, ...]
    groups: tuple[bytes, ...]
    final: bool = False
    stats: dict[str, float] = {}


class StepDone(Message):
    """Kind 35, rank 0 -> hub: the optimizer step is done (or skipped: the batch is quarantined, no new version).

    `bounds` are the eta and the max_lag that hold from now on; None leaves them.
    """

    version: U64
    skipped: bool
    reason: Text
    bounds: tuple[U32, U32] | None = None


class SnapshotRequest(Message):
    """Kind 36, rank 0 -> hub: give me the ledger as of this version; answered by `Snapshot`."""

    version: U64


class Snapshot(Message):
    """Kind 37, hub -> rank 0."""

    version: U64
    state: bytes


class Saved(Message):
    """Kind 38, rank 0 -> hub: the checkpoint of this version is published; send DURABLE."""

    version: U64


class Publish(Message):
    """Kind 39, rank 0 -> hub: becomes ANNOUNCE."""

    manifest: Manifest
    path: str
    nbytes: U64
    layout: Layout | None = None
    """With the first publication of a process only, together with the model's asset files."""
    assets_path: str = ""
    device_manifest: Manifest | None = None
    """The same document in digest_kind 1, for ways from GPU to GPU."""


class StopRequest(Message):
    """Kind 40, both ways: cut no further batch. A rank asks for it; the hub answers every later Take with it, so that
    all ranks stop after the same version."""

    reason: Text


class EvalRequest(Message):
    """Kind 41, rank 0 -> hub: score these evaluation prompts with at least this version."""

    eval_id: U32
    version: U64
    num_prompts: U32


class EvalResult(Message):
    """Kind 42, hub -> rank 0."""

    eval_id: U32
    version: U64
    num_prompts: U32
    score: float
    reward: float
    mean_tokens: float
    truncated_fraction: float
    scores: dict[Word, float] = {}  # means of the task's named scores


class BatchPending(Message):
    """Kind 43, hub -> rank: still no batch; for whom the hub waits. Also proof of life while a rank waits."""

    version: U64
    waiting_for: Text
    waited_s: float
    num_actors: U32


class HubStatus(Message):
    """Kind 44, hub -> rank 0, once a second: counters for metrics and the live view."""

    version: U64
    counters: dict[str, float]
    actors: tuple[tuple[str, str, float, float], ...]


class Shutdown(Message):
    """Kind 45, rank 0 -> hub: the last word. `finished`: the run is over, actors exit 0; else they wait for a
    successor at this address."""

    reason: Text
    finished: bool
