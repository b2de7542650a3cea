"""The broadcaster, which moves weights from GPU to GPU: with the hub, and with actors that share its GPU."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from streamrl.messages.base import (
    ACTOR_TO_IPC,
    HUB_TO_BROADCASTER,
    IPC_TO_ACTOR,
    RANK_TO_HUB,
    U16,
    U32,
    Id,
    LongText,
    Message,
    Text,
    VersionRef,
    message,
)
from streamrl.messages.weights import IpcBufferTicket, Layout, Manifest


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


@message(51, RANK_TO_HUB)
class BroadcastReport(Message):
    """Progress of an epoch; NAMED carries the unique id, FAILED the reason.

    ALIVE is the broadcaster's heartbeat and of no epoch: once a second, for as long as no thread of it hangs.
    """

    epoch: U32
    stage: BroadcastStage
    unique_id: Annotated[bytes, Meta(max_length=256)] = b""
    error: LongText = ""
    seconds: float = 0.0


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
