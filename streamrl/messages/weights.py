"""Weights: layout, manifest, the transports that a version is offered by, and pulling it."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from streamrl.messages.base import (
    FROM_WEIGHTS,
    TO_WEIGHTS,
    U16,
    U32,
    U64,
    Digest,
    Id,
    Message,
    VersionRef,
    Word,
    message,
)


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
    """Fixed tokens and the learner's log-probs of them; they prove that an engine uses the bytes that arrived.

    `token_ids` are `<i4`; `logprobs` are `<f4`, natural, of token_ids[start:] at this temperature.
    """

    token_ids: Annotated[bytes, Meta(max_length=1 << 16)]
    start: U32
    temperature: float
    logprobs: Annotated[bytes, Meta(max_length=1 << 16)]
    tolerance: float
    """Largest mean absolute difference of a log-prob, in nats, of a healthy actor."""


class Manifest(Message):
    """The identity of a version: a 16-byte digest per bucket and a root over all (`streamrl.weights.manifest`)."""

    ref: VersionRef
    parent: VersionRef | None
    layout_digest: Digest
    digest_kind: Annotated[int, Meta(ge=0, le=2)]
    digests: Annotated[tuple[Digest, ...], Meta(max_length=1 << 20)]
    root: Digest
    probe: Probe | None = None
    """Not covered by the root; present every so many versions, and with the first of a learner process."""


class NcclTicket(Message):
    """A place in a membership epoch: rank `rank` of `world` in the communicator that `unique_id` names."""

    epoch: U32
    unique_id: Annotated[bytes, Meta(max_length=256)]
    world: U16
    rank: U16
    init_deadline_s: float
    bucket_deadline_s: float


class IpcBufferTicket(Message):
    """Staging buffers on a GPU: a process on the same device opens `handles` (CUDA IPC), each `slot_bytes` long."""

    device: Id
    handles: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=8)]
    slot_bytes: U64
    deadline_s: float


class NcclState(Message):
    """An actor's place in the membership epochs; 0 is none.

    `joining`: its communicator is being built here. `formed`: built and tested. `failed`: the last one that failed
    here. `broken`: nothing more can be formed in this process.
    """

    joining: U32 = 0
    formed: U32 = 0
    failed: U32 = 0
    broken: bool = False


class Offer(Message):
    """One transport by which a document can be had, and where.

    shm: `name` is a file to map, proven by `probe`, its first bytes. zmq: `name` is an endpoint to pull from. nccl: a
    broadcast. ipc: buffers on the same GPU, `name` is the broadcaster's local socket. A user's own transport puts into
    `name` and `probe` what its receiver needs.
    """

    transport: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=256)]
    nbytes: U64
    probe: bytes = b""
    parent: VersionRef | None = None
    """zmq: a receiver that holds this version may pull what changed since (`PullMode.DELTA`)."""
    manifest: Manifest | None = None
    """nccl, ipc: the same document in digest_kind 1, which a GPU can check."""
    nccl: NcclTicket | None = None
    slots: IpcBufferTicket | None = None


class Base(Message):
    """The weights that never change, of a run that trains an adapter: fetched once, while versions are adapters alone.

    An adapted layer computes with `W + scale * B A` (`streamrl.weights.adapter`).
    """

    manifest: Manifest
    layout: Layout
    scale: float
    offers: Annotated[tuple[Offer, ...], Meta(max_length=8)] = ()
    """Best first; empty between rank and hub."""


TRANSPORTS = {
    "shm": "streamrl.weights.shm.transport:SHM",
    "zmq": "streamrl.weights.pull.client:ZMQ",
    "nccl": "streamrl.weights.gpu.transports:NCCL",
    "ipc": "streamrl.weights.gpu.transports:IPC",
}
"""Name in settings, HELLO and offers -> where its `streamrl.weights.transport.Transport` is defined."""


class DeltaIndex(Message):
    """The contents of a delta: its base, and the encoded form of every bucket."""

    parent: VersionRef
    parent_root: Digest
    nbytes: Annotated[tuple[U64, ...], Meta(max_length=1 << 20)]
    digests: Annotated[tuple[Digest, ...], Meta(max_length=1 << 20)]


class PullMode(IntEnum):
    FULL = 0
    DELTA = 1
    ASSETS = 2


@message(8, TO_WEIGHTS)
class Pull(Message):
    """A request for a byte range of one bucket, or of the model's asset files."""

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


@message(9, FROM_WEIGHTS)
class Chunk(Message):
    """The range, its payload in frame 1, or why not."""

    target: VersionRef
    mode: PullMode
    bucket: U32
    offset: U64
    status: ChunkStatus
    retry_after_s: float
    total: U64
    length: U32
    digest: U64
