"""The records of a run's log, and their form in a file.

    length u32 | kind u8 | sequence u64 | body (MessagePack) | xxh3-64 of all of it, u64        little-endian

`length` counts the body. Sequence numbers start at 1 and rise by one from record to record, over all segments and
starts. Fields are only appended, with defaults, and kinds are never reused: an old log stays readable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ClassVar, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from streamrl.errors import StreamrlError
from streamrl.messages import Manifest, PlanRow

HEADER = struct.Struct("<IBQ")
TRAILER = struct.Struct("<Q")
OVERHEAD = HEADER.size + TRAILER.size
MAX_BODY = 1 << 31


class LogError(StreamrlError):
    """The log of a run is damaged, or does not hold what is asked of it."""


class Record(Struct, array_like=True, frozen=True, gc=False):
    """Base of all records."""

    KIND: ClassVar[int]


R = TypeVar("R", bound=Record)
KINDS: dict[int, type[Record]] = {}


def record(kind: int) -> Callable[[type[R]], type[R]]:
    """Class decorator: this struct is the body of records of a kind."""

    def register(cls: type[R]) -> type[R]:
        assert kind not in KINDS, f"kind {kind} is {KINDS[kind].__name__} already, not {cls.__name__}"
        cls.KIND = kind
        KINDS[kind] = cls
        return cls

    return register


@record(1)
class RunStarted(Record):
    """A start of the learner, the first one or a later one."""

    run_id: str
    start: int
    """Counts the starts of the learner, from 1."""
    learner_epoch: int
    version: int
    """It begins with these weights: of a checkpoint, or of the end of the log."""
    settings: str
    """The run's settings, as JSON."""
    environment: dict[str, str]
    """What bit-equality depends on: versions of packages, the torch build, threads, ranks, device."""
    again_from: int = -1
    """Batches from this version on were trained again from the log; -1 if none was."""
    equal: bool = True
    """These gave the published weights that the log names."""


@record(2)
class GroupArrived(Record):
    """A GROUP message of training: accepted, or refused for its age alone."""

    actor_id: str
    incarnation: int
    seq: int
    group_id: int
    prompt_index: int
    frame: bytes
    """As received; empty if it was refused and `stream.keep_refused` is off."""
    refused: str = ""
    """Why it was not accepted; "" for an accepted one."""
    digest: int = 0
    """xxh3-64 of a frame that is not kept."""


@record(3)
class GroupMoved(Record):
    """A change of a live group that does not follow from other records."""

    group_id: int
    state: int
    """As `learner.hub.ledger`: 0 ready, 1 leased, 2 held, 5 dropped."""
    reason: str = ""
    """Why it was dropped."""
    discarded: bool = False
    """What had arrived of it is not trained on: it is generated again."""
    actor_id: str = ""
    attempt: int = 0
    members: tuple[int, ...] = ()
    """Of a lease: who has it, and for which members."""
    max_lag: int = 0
    """The largest bound that a lease of the group has had."""


@record(4)
class BatchCut(Record):
    """The groups of a batch, handed to the learner's ranks to be trained at a version."""

    version: int
    plan: tuple[PlanRow, ...]
    frames: tuple[int, ...]
    """Sequence numbers of the GroupArrived records whose frames it holds, in its order."""
    dp_ranks: tuple[int, ...]
    """The data-parallel rank of every learner rank."""
    num_minibatches: int = 1


@record(5)
class StepTaken(Record):
    """The end of the oldest batch that was cut and has not ended."""

    version: int
    """After it: higher by the batch's optimizer steps, or the same if it was skipped."""
    skipped: bool
    reason: str = ""
    trained: bool = True
    """False: the ranks could not train on it and set it aside."""
    seconds: float = 0.0
    """Since the batch before, as the staleness control took them: the only measured time that steers training."""
    grad_norm: float = 0.0
    bounds: tuple[int, int] | None = None
    """(eta, max_lag) from now on, where a control moves them."""


@record(6)
class VersionPublished(Record):
    """A version that actors could have, with the digest of each bucket of its document and the root over them."""

    manifest: Manifest


@record(7)
class Evaluated(Record):
    """The result of an evaluation."""

    version: int
    dataset: str
    score: float
    prompt_scores: tuple[tuple[float, ...], ...] = ()


@record(8)
class CheckpointSaved(Record):
    """A checkpoint that is whole on the disk."""

    version: int
    next_sequence: int
    """The ledger inside it knows all records before this one."""


@record(9)
class RunStopped(Record):
    """The learner's last message."""

    reason: str
    finished: bool


_BIN_32 = struct.Struct(">BI")
"""MessagePack's head of up to 4 GiB of bytes."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}


def encode(sequence: int, body: Record) -> list[bytes]:
    """The bytes of one record, in parts: the frame of a group, nearly all of the log, is not copied."""
    parts = _group_parts(body) if isinstance(body, GroupArrived) else [_ENCODER.encode(body)]
    parts.insert(0, HEADER.pack(sum(map(len, parts)), body.KIND, sequence))
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    parts.append(TRAILER.pack(digest.intdigest()))
    return parts


def _group_parts(body: GroupArrived) -> list[bytes]:
    """What the encoder gives for a group, with the frame as a part of its own."""
    without = _ENCODER.encode(msgspec.structs.replace(body, frame=b""))
    after = _ENCODER.encode(body.refused) + _ENCODER.encode(body.digest)
    before = without[: -len(after) - len(_ENCODER.encode(b""))]
    return [before + _BIN_32.pack(0xC6, len(body.frame)), body.frame, after]


def size_of(header: bytes | memoryview) -> int | None:
    """Bytes of the whole record whose first bytes these are; None if they cannot be a record's."""
    length, kind, sequence = HEADER.unpack_from(header)
    plausible = length <= MAX_BODY and 0 < kind < 64 and 0 < sequence < 1 << 62
    return length + OVERHEAD if plausible else None


def check(data: bytes | memoryview) -> tuple[int, int]:
    """(sequence number, kind) of one whole record. Raises LogError: it does not match its digest."""
    _, kind, sequence = HEADER.unpack_from(data)
    end = len(data) - TRAILER.size
    with memoryview(data)[:end] as checked:
        digest = xxhash.xxh3_64_intdigest(checked)
    if digest != TRAILER.unpack_from(data, end)[0]:
        raise LogError(f"record {sequence} does not match its digest")
    return sequence, kind


def decode(data: bytes | memoryview) -> Record | None:
    """The body of one checked record; None for a kind of a later release. Raises LogError: its contents are wrong."""
    _, kind, sequence = HEADER.unpack_from(data)
    if kind not in _DECODERS:
        return None
    try:
        with memoryview(data)[HEADER.size : len(data) - TRAILER.size] as body:
            return _DECODERS[kind].decode(body)
    except msgspec.MsgspecError as error:
        raise LogError(f"record {sequence} ({KINDS[kind].__name__}) cannot be read: {error}") from error
