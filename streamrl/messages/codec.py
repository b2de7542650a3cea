"""One frame form for every message: a 16-byte preamble, then one MessagePack value.

    offset  size  field
    0       4     magic "SRLM"
    4       2     protocol, u16 little-endian
    6       1     kind, u8 (`streamrl.messages.base.message`)
    7       1     flags, 0 in protocol 1
    8       8     xxh3-64 of the body, u64 little-endian
    16      -     body

Decoding checks size, magic, protocol, flags, kind legal in this direction, digest and types, the cheapest first, each
with an exception class of its own (`streamrl.errors`). What a message *means* is checked elsewhere
(`streamrl.messages.validate`, the ledger).
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np
import xxhash

from streamrl.errors import BodyError, ContentError, DigestError, FrameError, KindError, ProtocolVersionError
from streamrl.messages import PROTOCOL, Direction, Message

MAGIC: Final = b"SRLM"
PREAMBLE: Final = struct.Struct("<4sHBBQ")
assert PREAMBLE.size == 16

_ENCODER = msgspec.msgpack.Encoder()
_RAW = (bytes, bytearray, memoryview)


def encode(message: Message, *, protocol: int = PROTOCOL) -> bytearray:
    """The frame of `message`, ready to send."""
    frame = bytearray(PREAMBLE.size)
    _ENCODER.encode_into(message, frame, PREAMBLE.size)
    body = memoryview(frame)[PREAMBLE.size :]
    digest = xxhash.xxh3_64_intdigest(body)
    body.release()
    PREAMBLE.pack_into(frame, 0, MAGIC, protocol, message.KIND, 0, digest)
    return frame


def check_form(message: Message) -> None:
    """Check a message against the types and limits that its receiver decodes it by. Raises BodyError.

    A struct checks nothing when it is made, so what a sender built may be refused. TypeError: no message can hold it.
    """
    # As `Decoder.decode`, but from the objects: nothing is encoded, and no bytes are copied.
    values = msgspec.to_builtins(message, builtin_types=_RAW)
    try:
        msgspec.convert(values, type(message), builtin_types=_RAW)
    except msgspec.ValidationError as error:
        raise BodyError(f"kind {message.KIND}: {error}") from error


def check_size(frame: bytes | bytearray | memoryview, max_bytes: int) -> None:
    """Raise FrameError for a frame that its receiver does not read."""
    if len(frame) > max_bytes:
        raise FrameError(f"a frame of {len(frame)} bytes is over the limit of {max_bytes} (max_message_bytes)")


def protocol_of(frame: bytes | bytearray | memoryview) -> int | None:
    """The protocol number in a frame's preamble; None without a preamble."""
    if len(frame) < PREAMBLE.size or bytes(frame[:4]) != MAGIC:
        return None
    return int(PREAMBLE.unpack_from(frame)[1])


class Decoder:
    """Typed decoding of one direction, up to `max_bytes` a frame; made once, because making one is slow."""

    def __init__(self, kinds: Direction, max_bytes: int = 64 << 20) -> None:
        self._decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in kinds.items()}
        self._names = ", ".join(f"{kind} {cls.__name__}" for kind, cls in kinds.items())
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | bytearray | memoryview) -> Message:
        """The message in `frame`. Raises FrameError, ProtocolVersionError, KindError, DigestError or BodyError."""
        view = memoryview(frame)
        check_size(view, self._max_bytes)
        if len(view) < PREAMBLE.size:
            raise FrameError(f"a frame of {len(view)} bytes is shorter than the {PREAMBLE.size}-byte preamble")
        magic, protocol, kind, flags, digest = PREAMBLE.unpack_from(view)
        if magic != MAGIC:
            raise FrameError(f"magic is {magic!r}, expected {MAGIC!r}: the peer is not streamrl")
        if protocol != PROTOCOL:
            raise ProtocolVersionError(
                f"the peer speaks protocol {protocol}, this build {PROTOCOL}: install the same release on both sides"
            )
        if flags != 0:
            raise FrameError(f"flags are {flags:#04x}, protocol {PROTOCOL} knows only 0")
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise KindError(f"kind {kind} is not legal here, expected one of {self._names}")
        body = view[PREAMBLE.size :]
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise DigestError(f"the body of a kind-{kind} frame ({len(body)} bytes) does not match its digest")
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BodyError(f"kind {kind}: {error}") from error


def pack_ids(ids: np.ndarray | list[int]) -> bytes:
    """Token ids [T] as raw `<i4`."""
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_logprobs(logprobs: np.ndarray | list[float]) -> bytes:
    """Log-probs [T] as raw `<f4`."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_ids(raw: bytes, *, vocab_size: int | None = None, what: str = "token") -> np.ndarray:
    """Raw `<i4` to an int32 array [T], a read-only view. Raises ContentError: `length`, or `vocabulary` for an id."""
    if len(raw) % 4:
        raise ContentError("length", f"{what} ids are {len(raw)} bytes, which is no multiple of 4")
    ids = np.frombuffer(raw, dtype="<i4")
    if vocab_size is not None and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ContentError("vocabulary", f"{what} id {bad} is outside the vocabulary 0..{vocab_size - 1}")
    return ids


def unpack_logprobs(raw: bytes, *, num_tokens: int | None = None) -> np.ndarray:
    """Raw `<f4` to a float32 array [T], a read-only view. Raises ContentError: `length`, or `finite` for a value."""
    if len(raw) % 4 or (num_tokens is not None and len(raw) != 4 * num_tokens):
        wanted = "a multiple of 4" if num_tokens is None else f"{4 * num_tokens} for {num_tokens} tokens"
        raise ContentError("length", f"log-probs are {len(raw)} bytes, expected {wanted}")
    logprobs = np.frombuffer(raw, dtype="<f4")
    bad = np.flatnonzero(~np.isfinite(logprobs))
    if len(bad):
        raise ContentError(
            "finite", f"{len(bad)} of {len(logprobs)} log-probs are not finite, the first is token {bad[0]}'s"
        )
    return logprobs
