"""The common parts of all messages: base class, directions, bounded field types, and the name of a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, TypeVar

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


class Message(Struct, array_like=True, frozen=True, gc=False):
    """Base of everything on the wire."""

    KIND: ClassVar[int]
    """The number in the preamble; only what `@message` marks travels alone and has one."""


M = TypeVar("M", bound=Message)
Direction = dict[int, type[Message]]
"""The kinds that are legal from one side to another; filled by `@message`, given to a `Decoder`."""

TO_HUB: Direction = {}
TO_ACTOR: Direction = {}
TO_WEIGHTS: Direction = {}
FROM_WEIGHTS: Direction = {}
RANK_TO_HUB: Direction = {}
HUB_TO_RANK: Direction = {}
HUB_TO_BROADCASTER: Direction = {}
ACTOR_TO_IPC: Direction = {}
IPC_TO_ACTOR: Direction = {}


def message(kind: int, *directions: Direction) -> Callable[[type[M]], type[M]]:
    """Class decorator: this struct travels alone, as `kind`, in these directions."""

    def register(cls: type[M]) -> type[M]:
        cls.KIND = kind
        for direction in directions:
            assert kind not in direction, f"kind {kind} is {direction[kind].__name__} already, not {cls.__name__}"
            direction[kind] = cls
        return cls

    return register


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
