"""Weights: layout, manifest, the ways by which a version travels, and pulling it."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from streamrl.messages.base import U16, U32, U64, Digest, Id, Message, VersionRef, Word


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


class IpcBufferTicket(Message):
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
    slots: IpcBufferTicket | None = None


class DeltaIndex(Message):
    """What there is to pull of a delta: its base, and the encoded form of every bucket."""

    parent: VersionRef
    parent_root: Digest
    nbytes: Annotated[tuple[U64, ...], Meta(max_length=1 << 20)]
    digests: Annotated[tuple[Digest, ...], Meta(max_length=1 << 20)]


class PullMode(IntEnum):
    FULL = 0
    DELTA = 1
    ASSETS = 2


class Pull(Message):
    """Kind 8, actor -> weight socket: give me this byte range of this bucket (or of the model's asset files)."""

    pull_token: Digest
    target: VersionRef
    mode: PullMode
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
    mode: PullMode
    bucket: U32
    offset: U64
    status: ChunkStatus
    retry_after_s: float
    total: U64
    length: U32
    digest: U64
