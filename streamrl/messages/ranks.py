"""Between the learner's other processes and the hub: ranks (batches, checkpoints, publishing, evaluations), and the
broadcaster, which moves weights from GPU to GPU and also serves actors that share its GPU."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from streamrl.messages.base import (
    ACTOR_TO_IPC,
    HUB_TO_BROADCASTER,
    HUB_TO_RANK,
    IPC_TO_ACTOR,
    RANK_TO_HUB,
    U16,
    U32,
    U64,
    Id,
    LongText,
    Message,
    Text,
    VersionRef,
    Word,
    message,
)
from streamrl.messages.weights import Base, IpcBufferTicket, Layout, Manifest


@message(32, RANK_TO_HUB)
class RankReady(Message):
    """This rank is up; sent by every rank of the process group before its first BatchRequest."""

    rank: U16
    world: U16
    version: U64


@message(33, RANK_TO_HUB)
class BatchRequest(Message):
    """This rank's share of the batch trained at this version; the first request cuts for all ranks."""

    rank: U16
    version: U64


class PlanRow(Message):
    """One member of the batch as every rank knows it, wherever it is trained."""

    group_id: U64
    index: U16
    rank: U16  # data-parallel
    num_tokens: U32
    num_action_tokens: U32
    reward: float
    head_lag: int  # at the batch's first optimizer step
    minibatch: U16 = 0


class GroupOrigin(Message):
    """Origin of a GROUP frame: the actor, and which prompt of its split."""

    actor_id: Id
    prompt_index: U64


class KeptGroup(Message):
    """A GROUP frame (preamble included) that is only read, never trained on."""

    frame: bytes
    origin: GroupOrigin
    fate: Word = ""
    """Why it is not trained on."""


@message(34, HUB_TO_RANK)
class BatchShare(Message):
    """The GROUP frames (preamble included) of this rank's groups, and the global plan."""

    version: U64
    plan: tuple[PlanRow, ...]
    groups: tuple[bytes, ...]
    final: bool = False
    stats: dict[str, float] = {}
    origins: tuple[GroupOrigin, ...] = ()
    """One for each of `groups`."""
    passed_over: tuple[KeptGroup, ...] = ()
    """For rank 0: some of what arrived since the batch before and is not trained on."""


class Agreement(Message):
    """Agreement of the log-probs that an actor recorded for a group with the learner's.

    Lag 0: scored by the version that every token names, so honest ones agree up to rounding, and tokens may have been
    drawn again. Otherwise by the current one.
    """

    actor_id: Id
    lag: U32  # of the oldest token
    num_tokens: U32
    difference: float  # mean |log-ratio|, nats
    num_drawn: U32 = 0
    num_other: U32 = 0  # of these, not what their seed draws


@message(35, RANK_TO_HUB)
class StepDone(Message):
    """The optimizer step is done or skipped (no new version); `bounds`: eta and max_lag from now on, if changed."""

    version: U64
    skipped: bool
    reason: Text
    bounds: tuple[U32, U32] | None = None
    agreements: tuple[Agreement, ...] = ()
    """Of the groups of the step, and of those that were audited."""
    trained: bool = True
    """False: the ranks could not train on the batch and set it aside."""
    seconds: float = 0.0
    """Since the batch before, as the staleness control took them."""
    grad_norm: float = 0.0


@message(36, RANK_TO_HUB)
class SnapshotRequest(Message):
    """The ledger as of this version, please; answered by `Snapshot`."""

    version: U64


@message(37, HUB_TO_RANK)
class Snapshot(Message):
    """The ledger as of this version, encoded."""

    version: U64
    state: bytes


@message(38, RANK_TO_HUB)
class Saved(Message):
    """The checkpoint of this version is published: its groups are DURABLE."""

    version: U64


@message(39, RANK_TO_HUB)
class Publish(Message):
    """A version is complete on disk; the hub announces it."""

    manifest: Manifest
    path: str
    nbytes: U64
    layout: Layout | None = None
    """With the first publication of a process only, together with the model's asset files."""
    assets_path: str = ""
    device_manifest: Manifest | None = None
    """The same document in digest_kind 1, for transports from GPU to GPU."""
    base: Base | None = None
    """With `layout`, if the versions are adapters; its document is in `base_path`."""
    base_path: str = ""


@message(40, RANK_TO_HUB, HUB_TO_RANK)
class StopRequest(Message):
    """Cut no further batch: asked by a rank, then the answer to every later BatchRequest, so that all ranks stop after
    the same version."""

    reason: Text


@message(41, RANK_TO_HUB)
class EvalRequest(Message):
    """Score these evaluation prompts with at least this version."""

    eval_id: U32
    version: U64
    num_prompts: U32
    keep: tuple[U32, ...] = ()
    """Prompts whose transcripts come back with the result."""
    num_responses: U16 = 1
    """Answers of each prompt."""
    dataset: Word = ""
    """Name of the evaluation set; empty for the run's own held-out records."""
    waits: bool = False
    """The learner does nothing else until the result is there."""


@message(42, HUB_TO_RANK)
class EvalResult(Message):
    """Means over the prompts of one evaluation."""

    eval_id: U32
    version: U64
    num_prompts: U32
    score: float
    reward: float
    mean_tokens: float
    truncated_fraction: float
    scores: dict[Word, float] = {}  # means of the task's named scores
    failure: str = ""
    """With num_prompts = 0: what went wrong in the last episode."""
    kept: tuple[KeptGroup, ...] = ()
    """Transcripts of the prompts that the request named, as far as they were scored."""
    prompt_scores: tuple[tuple[float, ...], ...] = ()
    """The scores of each prompt's answers, in the order of prompts; none for what could not be scored."""
    dataset: Word = ""
    """The evaluation set that was asked."""
    prompt_answers: tuple[tuple[str, ...], ...] = ()
    """The final answers behind `prompt_scores`."""
    versions: tuple[U64, U64] | None = None
    """Oldest and newest version that sampled a token of a scored answer; None without any."""
    num_unanswered: U32 = 0
    """Answers that were not waited for, because the version was kept for as long as allowed."""
    mean_turns: float = 1.0


@message(43, HUB_TO_RANK)
class BatchPending(Message):
    """Still no batch, and why; also the heartbeat of a hub whose rank waits."""

    version: U64
    waiting_for: Text
    waited_s: float
    num_actors: U32
    passed_over: tuple[KeptGroup, ...] = ()
    """For rank 0, once, before the first step: some of the groups that were all dropped."""


@message(44, HUB_TO_RANK)
class HubStatus(Message):
    """Counters for metrics and the live view, once a second."""

    version: U64
    counters: dict[str, float]
    actors: tuple[tuple[str, str, float, float], ...]
    first_failure: str = ""
    """The first failed episode since the hub began, in words."""
    fatal: str = ""
    """Why the run must stop; empty while it need not."""


@message(45, RANK_TO_HUB, HUB_TO_BROADCASTER)
class Shutdown(Message):
    """The learner ends. `finished`: the run is over and actors exit 0; else they retry this address."""

    reason: Text
    finished: bool


@message(46, RANK_TO_HUB)
class BroadcastUp(Message):
    """Ready for commands; its buffers and local socket, if `ipc` is used."""

    device: Id
    socket: Annotated[str, Meta(max_length=256)]
    slots: IpcBufferTicket | None


@message(47, HUB_TO_BROADCASTER)
class BroadcastDocument(Message):
    """The newest version: a host document in `path`."""

    manifest: Manifest
    device_manifest: Manifest
    path: str
    layout: Layout


@message(48, HUB_TO_BROADCASTER)
class BroadcastForm(Message):
    """Make a unique id, then form this epoch's communicator as rank 0 of `world`."""

    epoch: U32
    world: U16


@message(49, HUB_TO_BROADCASTER)
class BroadcastSend(Message):
    """Broadcast this version over this epoch's communicator."""

    epoch: U32
    ref: VersionRef


@message(50, HUB_TO_BROADCASTER)
class BroadcastAbort(Message):
    """Abort this epoch's communicator."""

    epoch: U32


class BroadcastStage(IntEnum):
    NAMED = 0
    FORMED = 1
    PROGRESS = 2
    SENT = 3
    FAILED = 4
    ALIVE = 5
    LOADED = 6


@message(51, RANK_TO_HUB)
class BroadcastReport(Message):
    """Progress of an epoch; NAMED carries the unique id, FAILED the reason.

    ALIVE is the broadcaster's heartbeat and of no epoch: once a second, for as long as no thread of it hangs. LOADED is
    of no epoch either: the document of `ref` can be sent, or cannot, for the reason in `error`.
    """

    epoch: U32
    stage: BroadcastStage
    unique_id: Annotated[bytes, Meta(max_length=256)] = b""
    error: LongText = ""
    seconds: float = 0.0
    ref: VersionRef | None = None


@message(52, RANK_TO_HUB)
class RankBeat(Message):
    """Heartbeat of a learner rank, from a thread of its own: the rank's activity, and for how long."""

    rank: U16
    world: U16
    pid: U32
    host: Id
    phase: Word
    phase_s: float
    collective: Word = ""
    """The collective operation that it waits in; empty in none of ours."""
    collective_s: float = 0.0
    num_collectives: U64 = 0
    """Entered so far: the rank with the fewest is the one that the others wait for."""
    closing: bool = False
    """The last one: the rank ends as it should."""
    failed: LongText = ""
    """What it fails with; `in_group`: the error came from a collective, so the cause may be another rank."""
    in_group: bool = False


@message(53, HUB_TO_RANK)
class EndGroup(Message):
    """The learner's process group cannot go on: exit at once, whatever the training thread waits for."""

    cause: LongText


@message(56, ACTOR_TO_IPC)
class IpcBufferOpen(Message):
    """A request for this version, bucket by bucket."""

    ref: VersionRef


@message(57, IPC_TO_ACTOR)
class IpcBufferFilled(Message):
    """Bucket `bucket` is in buffer `slot`, to be copied and freed."""

    ref: VersionRef
    bucket: U32
    slot: U16


@message(58, ACTOR_TO_IPC)
class IpcBufferFree(Message):
    """This bucket was copied; its buffer is free."""

    ref: VersionRef
    bucket: U32


@message(59, ACTOR_TO_IPC, IPC_TO_ACTOR)
class IpcBufferEnd(Message):
    """No more of this version, and why; a buffer that was not freed may be written again."""

    ref: VersionRef
    reason: Text
    gone: bool = False
