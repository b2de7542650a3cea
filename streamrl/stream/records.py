"""The records of a run's log, and their form in a file.

    magic | length u32 | kind u8 | sequence u64 | synced u64 | xxh3-64 of these | body (MessagePack) | xxh3-64 of it

Little-endian. `length` counts the body; records up to `synced` were on the disk before this one was written. The
header's digest begins with a number that the segment drew, the body's with the sequence number: no bytes of another
file and no frame that an actor made are taken for a record. Sequence numbers start at 1 and rise by one from record to
record, over all segments and starts. Fields are only appended, with defaults, and kinds are never reused: an old log
stays readable.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from streamrl.errors import StreamrlError
from streamrl.messages import Manifest, PlanRow

RECORD_MAGIC = b"\xf5REC"
HEADER = struct.Struct("<4sIBQQQ")
OLD_HEADER = struct.Struct("<IBQ")
"""The header of segments before it had a digest: length, kind, sequence; one digest of all follows the body."""
TRAILER = struct.Struct("<Q")
OVERHEAD = HEADER.size + TRAILER.size
MAX_BODY = 1 << 31
_DIGESTED = HEADER.size - 8


class LogError(StreamrlError):
    """The log of a run is damaged, or does not hold what is asked of it."""


class Header(NamedTuple):
    """The header of a record; in a segment with digests its fields are certain."""

    size: int
    """Bytes of the whole record."""
    kind: int
    sequence: int
    synced: int = 0


class Record(Struct, array_like=True, frozen=True, gc=False):
    """Base of all records."""

    KIND: ClassVar[int]


Buffer = bytes | mmap.mmap
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
    """The version that it begins with: of a checkpoint, or of the end of the log."""
    settings: str
    """The run's settings, as JSON."""
    environment: dict[str, str]
    """The conditions of bit-equality: versions of packages, the torch build, threads, ranks, device."""
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
    """True: the group is generated again, and its answers so far are not trained on."""
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
    """The bytes after a record's header, in parts: the frame of a group, nearly all of the log, is not copied."""
    parts = _group_parts(body) if isinstance(body, GroupArrived) else [_ENCODER.encode(body)]
    digest = xxhash.xxh3_64(seed=sequence)
    for part in parts:
        digest.update(part)
    parts.append(TRAILER.pack(digest.intdigest()))
    return parts


def _group_parts(body: GroupArrived) -> list[bytes]:
    """The encoding of a group, with the frame as a part of its own."""
    without = _ENCODER.encode(msgspec.structs.replace(body, frame=b""))
    after = _ENCODER.encode(body.refused) + _ENCODER.encode(body.digest)
    before = without[: -len(after) - len(_ENCODER.encode(b""))]
    return [before + _BIN_32.pack(0xC6, len(body.frame)), body.frame, after]


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which the records of one segment are written.

    Attributes:
        salt: the header's digest begins with it; None for an old segment, whose headers have none.
    """

    salt: int | None

    @property
    def header_size(self) -> int:
        return OLD_HEADER.size if self.salt is None else HEADER.size

    def pack(self, sequence: int, kind: int, length: int, synced: int) -> bytes:
        """The header of a record; `length` is that of its body."""
        fields = HEADER.pack(RECORD_MAGIC, length, kind, sequence, synced, 0)[:_DIGESTED]
        return fields + TRAILER.pack(xxhash.xxh3_64_intdigest(fields, seed=self.salt or 0))

    def header(self, data: Buffer, at: int) -> Header | None:
        """The header at a place; None if no record can begin there."""
        raw = data[at : at + self.header_size]
        if len(raw) < self.header_size:
            return None
        if self.salt is None:
            length, kind, sequence = OLD_HEADER.unpack(raw)
            if not (length <= MAX_BODY and 0 < kind < 64 and 0 < sequence < 1 << 62):
                return None
            return Header(length + OLD_HEADER.size + TRAILER.size, kind, sequence)
        magic, length, kind, sequence, synced, digest = HEADER.unpack(raw)
        if magic != RECORD_MAGIC or digest != xxhash.xxh3_64_intdigest(raw[:_DIGESTED], seed=self.salt):
            return None
        return Header(length + OVERHEAD, kind, sequence, synced)

    def whole(self, data: Buffer, at: int, header: Header) -> bool:
        """Whether all of a record is there, and matches its digest."""
        end = at + header.size - TRAILER.size
        if end + TRAILER.size > len(data):
            return False
        old = self.salt is None
        with memoryview(data)[at if old else at + HEADER.size : end] as checked:
            digest = xxhash.xxh3_64_intdigest(checked, seed=0 if old else header.sequence)
        return digest == TRAILER.unpack_from(data, end)[0]

    def later(self, data: Buffer, at: int, sequence: int) -> Iterator[tuple[int, Header]]:
        """Yield (place, header) of whole records after a place, with a number after this one."""
        before, pattern = 0, re.escape(RECORD_MAGIC)
        if self.salt is None:  # nothing marks a record: a kind, and a number whose upper six bytes are as those here
            upper = {struct.pack("<Q", one)[2:] for one in (sequence, sequence + 0x10000)}
            before, pattern = 4, b"(?=[\x01-\x3f]..(?:" + b"|".join(map(re.escape, sorted(upper))) + b"))"
        most = sequence + len(data)
        for found in re.finditer(pattern, data[at + 1 + before :], re.DOTALL):
            place = at + 1 + found.start()
            header = self.header(data, place)
            if header is not None and sequence < header.sequence < most and self.whole(data, place, header):
                yield place, header


def decode(data: bytes | memoryview, form: Form, header: Header) -> Record | None:
    """The body of one checked record; None for a kind of a later release. Raises LogError: its contents are wrong."""
    if header.kind not in _DECODERS:
        return None
    try:
        with memoryview(data)[form.header_size : len(data) - TRAILER.size] as body:
            return _DECODERS[header.kind].decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LogError(f"record {header.sequence} ({KINDS[header.kind].__name__}) cannot be read: {error}") from error
