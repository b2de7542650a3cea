"""Every struct that crosses a process, and the words they use.

Glossary
    prompt        one record of the task, found by its index
    episode       one run of an environment from reset to end
    trajectory    one episode as tokens; on the wire a `Member` of a `Group`
    group         the trajectories of one prompt that share a baseline: the unit of leases, capacity and batches
    lease         the right and duty of one actor to produce one group; also the credit
    attempt       how often this group had been leased before, from 0
    version       number of optimizer steps done; a `VersionRef` adds the learner's epoch
    lag           version at training minus version that sampled the token, in optimizer steps
    verdict       what the ledger decides about an incoming group
    document      one version's weights as ordered bytes, described by a `Manifest`

Wire form: `streamrl.codec` puts a 16-byte preamble before one MessagePack value. Structs are `array_like`, so a field's
position is its name: fields are only appended, with defaults, never removed, reordered or retyped inside a protocol
number. Token ids travel as raw `<i4`, log-probs as raw `<f4`; ranges are half open `(start, end)`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL = 1
EVAL_BIT = 1 << 63
"""Set in the group_id of evaluation groups, which stand outside capacity and are never trained on."""

Id = Annotated[str, Meta(max_length=64)]
Word = Annotated[str, Meta(max_length=32)]
Text = Annotated[str, Meta(max_length=512)]
LongText = Annotated[str, Meta(max_length=2048)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
U64 = Annotated[int, Meta(ge=0)]  # msgspec takes no bound over int64; MessagePack itself ends at 2**64 - 1
Range = tuple[U32, U32]
SeqRange = tuple[U64, U64]
LeaseRef = tuple[U64, U16]
SpanRow = tuple[U32, U64, U32, U32]
TurnRow = tuple[U32, U32, float]


class Message(Struct, array_like=True, frozen=True, gc=False):
    """Base of everything on the wire."""


class VersionRef(Message, order=True):
    """(learner_epoch, version); compared lexicographically, strictly increasing at every actor."""

    learner_epoch: U32
    version: U64

    def __str__(self) -> str:
        return f"{self.learner_epoch}:{self.version}"


class Lineage(Message):
    """The versions of one past or present epoch that lie on the surviving history; empty if last < first."""

    learner_epoch: U32
    first: U64
    last: int


class Sampling(Message):
    """The processed distribution that actions are drawn from; the learner scores the same one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


class Limits(Message):
    """Numbers of the hub that an actor must respect."""

    heartbeat_s: float = 1.0
    hub_silent_s: float = 3.0
    hello_timeout_s: float = 5.0
    ack_timeout_s: float = 5.0
    progress_deadline_s: float = 120.0
    chunk_timeout_s: float = 5.0
    drain_deadline_s: float = 60.0
    bye_timeout_s: float = 2.0
    chunk_bytes: U32 = 1 << 20
    pull_window: U16 = 8
    max_message_bytes: U32 = 64 << 20
    outbox_groups: U16 = 256
    outbox_bytes: U64 = 1 << 30
    max_prompt_tokens: U32 = 1 << 20
    max_new_tokens: U32 = 1 << 20
    vocab_size: U32 = 1 << 31
    max_lag: U32 = 1 << 31


# --- weights -----------------------------------------------------------------------------------------------------


class TensorSpec(Message):
    """One tensor of a document: checkpoint name, wire dtype (numpy-style, or "bfloat16"), shape."""

    name: Annotated[str, Meta(max_length=512)]
    dtype: Word
    shape: Annotated[tuple[U64, ...], Meta(max_length=8)]


class Layout(Message):
    """The order of tensors in a document and its split into buckets; changes only with the model."""

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=1 << 20)]
    bucket_bytes: Annotated[tuple[U64, ...], Meta(max_length=1 << 20)]


class Probe(Message):
    """Fixed tokens and the learner's log-probs of them: digests prove that bytes arrived, this that an engine uses
    them. `token_ids` are `<i4`; `logprobs` are `<f4`, natural, of token_ids[start:] at this temperature."""

    token_ids: Annotated[bytes, Meta(max_length=1 << 16)]
    start: U32
    temperature: float
    logprobs: Annotated[bytes, Meta(max_length=1 << 16)]
    tolerance: float
    """Largest mean absolute difference of a log-prob, in nats, of a healthy actor."""


class Manifest(Message):
    """What a version is: one 16-byte digest a bucket and a root over all of them (`streamrl.weights.manifest`)."""

    ref: VersionRef
    parent: VersionRef | None
    layout_digest: Digest
    digest_kind: Annotated[int, Meta(ge=0, le=2)]
    digests: Annotated[tuple[Digest, ...], Meta(max_length=1 << 20)]
    root: Digest
    probe: Probe | None = None
    """Not covered by the root; there every so many versions, and at the first of a learner process."""


class NcclTicket(Message):
    """A place in a membership epoch: rank `rank` of `world` in the communicator that `unique_id` names."""

    epoch: U32
    unique_id: Annotated[bytes, Meta(max_length=256)]
    world: U16
    rank: U16
    init_deadline_s: float
    bucket_deadline_s: float


class SlotTicket(Message):
    """Staging slots on a GPU: who has the same device opens `handles` (CUDA IPC), each `slot_bytes` long."""

    device: Id
    handles: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=8)]
    slot_bytes: U64
    deadline_s: float


class NcclState(Message):
    """An actor's place in the membership epochs: the epoch whose communicator it builds, the one that is formed and
    tested, and the last one that failed here; 0 is none. `broken`: nothing more can be formed in this process."""

    joining: U32 = 0
    formed: U32 = 0
    failed: U32 = 0
    broken: bool = False


class Offer(Message):
    """One way to get a document. shm: a file to map, proven by `probe`, its first bytes. zmq: an endpoint to pull.
    nccl: a broadcast. ipc: slots on the same GPU, and the sender's local socket in `name`."""

    transport: Annotated[str, Meta(max_length=8)]
    name: Annotated[str, Meta(max_length=256)]
    nbytes: U64
    probe: bytes = b""
    parent: VersionRef | None = None
    """zmq: who holds this version may pull what changed since (`PullMode.DELTA`)."""
    manifest: Manifest | None = None
    """nccl, ipc: the same document in digest_kind 1, which a GPU can check."""
    nccl: NcclTicket | None = None
    slots: SlotTicket | None = None


class DeltaIndex(Message):
    """What there is to pull of a delta: its base, and the encoded form of every bucket."""

    parent: VersionRef
    parent_root: Digest
    nbytes: Annotated[tuple[U64, ...], Meta(max_length=1 << 20)]
    digests: Annotated[tuple[Digest, ...], Meta(max_length=1 << 20)]


# --- actor <-> hub -----------------------------------------------------------------------------------------------


class Hello(Message):
    """Kind 1, actor -> hub: who I am, what I hold, what I can do. First message of every link."""

    protocol_min: U16
    protocol_max: U16
    actor_id: Id
    incarnation: U64
    run_id: Id | None
    engine: Word
    software: Id
    slots: U16
    transports: Annotated[tuple[str, ...], Meta(max_length=8)]
    installed: tuple[VersionRef, Digest] | None
    held: Annotated[tuple[LeaseRef, ...], Meta(max_length=1024)]
    outbox: Annotated[tuple[SeqRange, ...], Meta(max_length=1024)]
    next_seq: U64
    device: Id = ""
    """UUID of the GPU that the engine is on; empty on a CPU."""


class Welcome(Message):
    """Kind 2, hub -> actor: run, limits, task, layout, current manifest, and what is already settled."""

    protocol: U16
    run_id: Id
    learner_epoch: U32
    version: U64
    lineage: Annotated[tuple[Lineage, ...], Meta(max_length=1024)]
    limits: Limits
    task: Annotated[bytes, Meta(max_length=1 << 20)]
    layout: Layout | None
    manifest: Manifest | None
    offers: Annotated[tuple[Offer, ...], Meta(max_length=8)]
    pull_token: Digest
    assets_nbytes: U64
    assets_digest: Digest
    settled_upto: U64
    settled: Annotated[tuple[SeqRange, ...], Meta(max_length=1024)]
    durable_upto: U64
    durable: Annotated[tuple[SeqRange, ...], Meta(max_length=1024)]
    held: Annotated[tuple[tuple[LeaseRef, bool], ...], Meta(max_length=1024)]


class Purpose(IntEnum):
    TRAIN = 0
    EVAL = 1


class Lease(Message):
    """Generate these members of this group with these seeds. A repeated attempt is the same draw: same seeds."""

    group_id: U64
    attempt: U16
    prompt_index: U64
    pass_index: U32
    prompt: Annotated[bytes, Meta(max_length=1 << 20)] | None
    members: Annotated[tuple[U16, ...], Meta(max_length=1024)]
    seeds: Annotated[tuple[U64, ...], Meta(max_length=1024)]
    min_version: VersionRef
    sampling: Sampling
    ttl_s: float
    purpose: Annotated[int, Meta(ge=0, le=1)] = 0

    @property
    def ref(self) -> tuple[int, int]:
        return (self.group_id, self.attempt)


class Leases(Message):
    """Kind 3, hub -> actor: grants and revocations."""

    grants: Annotated[tuple[Lease, ...], Meta(max_length=64)] = ()
    revoked: Annotated[tuple[LeaseRef, ...], Meta(max_length=1024)] = ()


class Outcome(IntEnum):
    COMPLETE = 0
    PARTIAL = 1
    RETURNED = 2


class ReturnReason(IntEnum):
    NONE = 0
    STALE = 1
    ENV_ERROR = 2
    ENGINE_ERROR = 3
    DRAIN = 4
    TOO_LONG = 5
    PROMPT_INVALID = 6
    TIMEOUT = 7
    POISON = 8
    NO_SLOT = 9


class MemberStatus(IntEnum):
    FINISHED = 0
    TRUNCATED = 1
    ABORTED = 2


class Member(Message):
    """One trajectory. `token_ids` holds every token after the prompt, actions and observations alike (T of them).

    `logprobs` are natural logs of the sampled token under the *processed* sampling distribution, exactly 0.0 off the
    mask: the denominator of the importance ratio, always. `mask` lists action-token ranges; `versions` rows are (epoch,
    version, start, end), `turns` rows are (start, end, reward): each action token is in exactly one of each.
    """

    index: U16
    status: Annotated[int, Meta(ge=0, le=2)]
    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    mask: Annotated[tuple[Range, ...], Meta(max_length=4096)]
    versions: Annotated[tuple[SpanRow, ...], Meta(max_length=256)]
    turns: Annotated[tuple[TurnRow, ...], Meta(max_length=1024)]
    reward: float
    scores: Annotated[dict[Word, float], Meta(max_length=64)]
    finish: Word


class Group(Message):
    """Kind 4, actor -> hub: finished trajectories of a lease, or the lease handed back."""

    incarnation: U64
    seq: U64
    group_id: U64
    attempt: U16
    outcome: Annotated[int, Meta(ge=0, le=2)]
    reason: Annotated[int, Meta(ge=0, le=9)]
    detail: Text
    sampling: Sampling
    members: Annotated[tuple[Member, ...], Meta(max_length=1024)]
    stats: Annotated[dict[Word, float], Meta(max_length=64)]


class RejectReason(IntEnum):
    NONE = 0
    DUPLICATE = 1
    STALE = 2
    VERSION = 3
    FENCED = 4
    MALFORMED = 5
    NO_LEASE = 6
    OVERSIZE = 7
    FINISHED = 8


class Ack(Message):
    """Kind 5, hub -> actor, batched. ACCEPTED: the ledger holds it. DURABLE: a published checkpoint covers it."""

    incarnation: U64
    settled_upto: U64
    accepted: Annotated[tuple[SeqRange, ...], Meta(max_length=256)]
    durable_upto: U64
    durable: Annotated[tuple[SeqRange, ...], Meta(max_length=256)]
    rejected: Annotated[tuple[tuple[U64, int, Annotated[str, Meta(max_length=256)]], ...], Meta(max_length=64)]


class ActorState(IntEnum):
    CONNECTING = 0
    SYNCING = 1
    RUNNING = 2
    PARTED = 3
    DRAINING = 4
    LEAVING = 5
    GONE = 6


class ActorBeat(Message):
    """Kind 6, actor -> hub: alive, and making progress."""

    incarnation: U64
    beat: U64
    state: Annotated[int, Meta(ge=0, le=6)]
    free: U16
    running: U16
    installed: VersionRef | None
    tokens_total: U64
    stuck: Annotated[tuple[LeaseRef, ...], Meta(max_length=64)]
    outbox_groups: U16
    outbox_bytes: U64
    free_eval: U16 = 0
    stats: Annotated[dict[Word, float], Meta(max_length=64)] = {}
    slots: U16 = 0
    """Training leases it holds at most, once it knows the run's sizes; 0 leaves what HELLO said."""
    root: Annotated[bytes, Meta(max_length=16)] = b""
    """Of the version in `installed`; empty without one."""
    nccl: NcclState | None = None
    """Where it is with the communicators that it was invited to; None if it takes no part in any."""
    held: Annotated[tuple[LeaseRef, ...], Meta(max_length=1024)] | None = None
    """Leases at work here; None does not say."""


class HubBeat(Message):
    """Kind 6, hub -> actor: alive; what the learner waits for; the oldest version that is still useful."""

    beat: U64
    learner_epoch: U32
    version: U64
    min_useful: VersionRef
    waiting_for: Annotated[str, Meta(max_length=128)]


class Announce(Message):
    """Kind 7, hub -> actor: a new version and the ways to get it, best first."""

    manifest: Manifest
    offers: Annotated[tuple[Offer, ...], Meta(max_length=8)]


class PullMode(IntEnum):
    FULL = 0
    DELTA = 1
    ASSETS = 2


class Pull(Message):
    """Kind 8, actor -> weight socket: give me this byte range of this bucket (or of the model's asset files)."""

    pull_token: Digest
    target: VersionRef
    mode: Annotated[int, Meta(ge=0, le=2)]
    bucket: U32
    offset: U64
    length: U32


class ChunkStatus(IntEnum):
    OK = 0
    GONE = 1
    BUSY = 2
    DENIED = 3


class Chunk(Message):
    """Kind 9, weight socket -> actor: the range, its payload in frame 1, or why not."""

    target: VersionRef
    mode: Annotated[int, Meta(ge=0, le=2)]
    bucket: U32
    offset: U64
    status: Annotated[int, Meta(ge=0, le=3)]
    retry_after_s: float
    total: U64
    length: U32
    digest: U64


class InstallSource(IntEnum):
    SAME = 0
    SHM = 1
    ZMQ = 2
    ZMQ_DELTA = 3
    NCCL = 4
    IPC = 5


class Probed(Message):
    """How an actor's engine compares with what it should serve; `failed` is "" for a healthy one.

    `mean` and `largest` are absolute differences from the learner's log-probs, in nats; None where the manifest has no
    probe or the engine cannot score tokens.
    """

    mean: float | None
    largest: float | None
    failed: LongText
    probe_s: float


class Installed(Message):
    """Kind 10, actor -> hub: this version is live here, or why not."""

    target: VersionRef
    root: Digest
    ok: bool
    source: Annotated[int, Meta(ge=0, le=5)]
    transfer_s: float
    verify_s: float
    pause_s: float
    install_s: float
    nbytes: U64
    error: LongText
    probe: Probed | None = None


class Drain(Message):
    """Kind 11, both ways: finish what you hold, take no more."""

    reason: Id
    deadline_s: float
    until: Annotated[int, Meta(ge=0, le=1)] = 1


class Bye(Message):
    """Kind 12, both ways: all settled, closing."""

    last_seq: U64
    note: Annotated[str, Meta(max_length=256)]


class StopReason(IntEnum):
    NO_LINK = 1
    RESTARTING = 2
    FINISHED = 3
    FENCED = 4
    PROTOCOL = 5
    MODEL = 6
    WRONG_RUN = 7
    EVICTED = 8
    BUSY = 9
    AUTH = 10


class Stop(Message):
    """Kind 13, hub -> actor: refused, fenced, finished, or "say HELLO again"."""

    reason: Annotated[int, Meta(ge=1, le=10)]
    rejoin: bool
    retry_after_s: float
    exit_code: Annotated[int, Meta(ge=0, le=255)]
    detail: Text


# --- learner ranks <-> hub ---------------------------------------------------------------------------------------


class RankReady(Message):
    """Kind 32, rank -> hub: this rank is up. All ranks of a gang before the first Take."""

    rank: U16
    world: U16
    version: U64


class Take(Message):
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


class Trained(Message):
    """Kind 35, rank 0 -> hub: the optimizer step is done (or skipped: the batch is quarantined, no new version).

    `bounds` are the eta and the max_lag that hold from now on; None leaves them.
    """

    version: U64
    skipped: bool
    reason: Text
    bounds: tuple[U32, U32] | None = None


class Freeze(Message):
    """Kind 36, rank 0 -> hub: give me the ledger as of this version; answered by `FrozenState`."""

    version: U64


class FrozenState(Message):
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


class Halt(Message):
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


class RankWait(Message):
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


# --- hub <-> sender: the process that moves weights from GPU to GPU -----------------------------------------------


class SenderUp(Message):
    """Kind 46, sender -> hub: ready for commands; its slots and local socket, if there is `ipc`."""

    device: Id
    socket: Annotated[str, Meta(max_length=256)]
    slots: SlotTicket | None


class SenderDocument(Message):
    """Kind 47, hub -> sender: the newest version, a host document in `path`."""

    manifest: Manifest
    device_manifest: Manifest
    path: str
    layout: Layout


class SenderForm(Message):
    """Kind 48, hub -> sender: as rank 0 of `world`, make a unique id, then form this epoch's communicator."""

    epoch: U32
    world: U16


class SenderSend(Message):
    """Kind 49, hub -> sender: broadcast this version by this epoch's communicator."""

    epoch: U32
    ref: VersionRef


class SenderAbort(Message):
    """Kind 50, hub -> sender: this epoch is over."""

    epoch: U32


class SenderStage(IntEnum):
    NAMED = 0
    FORMED = 1
    PROGRESS = 2
    SENT = 3
    FAILED = 4


class SenderReport(Message):
    """Kind 51, sender -> hub: how far the epoch is. NAMED carries the unique id, FAILED the reason."""

    epoch: U32
    stage: Annotated[int, Meta(ge=0, le=4)]
    unique_id: Annotated[bytes, Meta(max_length=256)] = b""
    error: LongText = ""
    seconds: float = 0.0


# --- actor <-> sender: slots on one GPU, over a local socket ------------------------------------------------------


class SlotOpen(Message):
    """Kind 56, actor -> sender: I want this version, bucket by bucket."""

    ref: VersionRef


class SlotFilled(Message):
    """Kind 57, sender -> actor: bucket `bucket` lies in slot `slot`; copy it and say so."""

    ref: VersionRef
    bucket: U32
    slot: U16


class SlotFree(Message):
    """Kind 58, actor -> sender: I have this bucket."""

    ref: VersionRef
    bucket: U32


class SlotEnd(Message):
    """Kind 59, both ways: no more of this version, and why. A slot that was not freed may be written again."""

    ref: VersionRef
    reason: Text
    gone: bool = False


TO_HUB: dict[int, type[Message]] = {
    1: Hello, 4: Group, 6: ActorBeat, 10: Installed, 11: Drain, 12: Bye,
}
TO_ACTOR: dict[int, type[Message]] = {
    2: Welcome, 3: Leases, 5: Ack, 6: HubBeat, 7: Announce, 11: Drain, 12: Bye, 13: Stop,
}
TO_WEIGHTS: dict[int, type[Message]] = {8: Pull}
FROM_WEIGHTS: dict[int, type[Message]] = {9: Chunk}
RANK_TO_HUB: dict[int, type[Message]] = {
    32: RankReady, 33: Take, 35: Trained, 36: Freeze, 38: Saved, 39: Publish, 40: Halt, 41: EvalRequest,
    45: Shutdown, 46: SenderUp, 51: SenderReport,
}
HUB_TO_RANK: dict[int, type[Message]] = {
    34: BatchShare, 37: FrozenState, 40: Halt, 42: EvalResult, 43: RankWait, 44: HubStatus,
}
HUB_TO_SENDER: dict[int, type[Message]] = {
    45: Shutdown, 47: SenderDocument, 48: SenderForm, 49: SenderSend, 50: SenderAbort,
}
SLOT_TO_SENDER: dict[int, type[Message]] = {56: SlotOpen, 58: SlotFree, 59: SlotEnd}
SLOT_TO_ACTOR: dict[int, type[Message]] = {57: SlotFilled, 59: SlotEnd}
