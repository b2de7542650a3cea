"""The process that moves weights from GPU to GPU: with the hub, and over slots with actors of the same GPU."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from streamrl.messages.base import U16, U32, Id, LongText, Message, Text, VersionRef
from streamrl.messages.weights import IpcBufferTicket, Layout, Manifest


class BroadcastUp(Message):
    """Kind 46, sender -> hub: ready for commands; its slots and local socket, if there is `ipc`."""

    device: Id
    socket: Annotated[str, Meta(max_length=256)]
    slots: IpcBufferTicket | None


class BroadcastDocument(Message):
    """Kind 47, hub -> sender: the newest version, a host document in `path`."""

    manifest: Manifest
    device_manifest: Manifest
    path: str
    layout: Layout


class BroadcastForm(Message):
    """Kind 48, hub -> sender: as rank 0 of `world`, make a unique id, then form this epoch's communicator."""

    epoch: U32
    world: U16


class BroadcastSend(Message):
    """Kind 49, hub -> sender: broadcast this version by this epoch's communicator."""

    epoch: U32
    ref: VersionRef


class BroadcastAbort(Message):
    """Kind 50, hub -> sender: this epoch is over."""

    epoch: U32


class BroadcastStage(IntEnum):
    NAMED = 0
    FORMED = 1
    PROGRESS = 2
    SENT = 3
    FAILED = 4
    ALIVE = 5


class BroadcastReport(Message):
    """Kind 51, sender -> hub: how far the epoch is. NAMED carries the unique id, FAILED the reason.

    ALIVE is of no epoch: it comes every second, for as long as no thread of the sender hangs.
    """

    epoch: U32
    stage: BroadcastStage
    unique_id: Annotated[bytes, Meta(max_length=256)] = b""
    error: LongText = ""
    seconds: float = 0.0


class IpcBufferOpen(Message):
    """Kind 56, actor -> sender: I want this version, bucket by bucket."""

    ref: VersionRef


class IpcBufferFilled(Message):
    """Kind 57, sender -> actor: bucket `bucket` lies in slot `slot`; copy it and say so."""

    ref: VersionRef
    bucket: U32
    slot: U16


class IpcBufferFree(Message):
    """Kind 58, actor -> sender: I have this bucket."""

    ref: VersionRef
    bucket: U32


class IpcBufferEnd(Message):
    """Kind 59, both ways: no more of this version, and why. A slot that was not freed may be written again."""

    ref: VersionRef
    reason: Text
    gone: bool = False
