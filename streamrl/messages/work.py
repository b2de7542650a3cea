"""Between actors and the hub, about the work: leases, groups, accept results."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from streamrl.messages.base import (
    TO_ACTOR,
    TO_HUB,
    U16,
    U32,
    U64,
    LeaseRef,
    Message,
    Range,
    Sampling,
    SeqRange,
    Text,
    VersionRef,
    Word,
    message,
)

MAX_RECORD_BYTES = 1 << 20
"""Most bytes of a record in a lease, as JSON."""
MAX_SEQUENCES = 1024
"""Most sequences of one trajectory."""


class Purpose(IntEnum):
    TRAIN = 0
    EVAL = 1


class Lease(Message):
    """The order to generate these members of a group; a repeated attempt has the same seeds, so it is the same draw."""

    group_id: U64
    attempt: U16
    prompt_index: U64
    pass_index: U32
    prompt: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)] | None
    members: Annotated[tuple[U16, ...], Meta(max_length=1024)]
    seeds: Annotated[tuple[U64, ...], Meta(max_length=1024)]
    min_version: VersionRef
    sampling: Sampling
    ttl_s: float
    purpose: Purpose = Purpose.TRAIN
    dataset: Word = ""
    """Evaluation set that the prompt is of; empty for the run's own held-out records."""
    keep_s: float = 0.0
    """Above 0: answer with exactly `min_version`, and delay installs until this lease is done, so long at most."""
    num_after: U32 = 0
    """Prompts that wait for the same version after this one."""

    @property
    def ref(self) -> tuple[int, int]:
        return (self.group_id, self.attempt)


@message(3, TO_ACTOR)
class Leases(Message):
    """Grants and revocations."""

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
    """TRUNCATED: the episode was cut before the environment was done, so its end has a value of its own.

    An answer that a limit of tokens cut and that the environment judged all the same is FINISHED: its reward is all
    that follows. `Member.finish` tells that it was cut (`length`).
    """

    FINISHED = 0
    TRUNCATED = 1
    ABORTED = 2


class Span(Message):
    """Tokens start..end were sampled by this version."""

    learner_epoch: U32
    version: U64
    start: U32
    end: U32


class Turn(Message):
    """Tokens start..end are one turn of the episode, worth this reward."""

    start: U32
    end: U32
    reward: float


class SequenceStart(Message):
    """A new context: from token `start` of a trajectory on, the model read these ids in place of all before."""

    start: U32
    prompt_ids: bytes


class Member(Message):
    """One trajectory. `token_ids` holds every token after the prompt, actions and observations alike (T of them).

    `logprobs` are natural logs of the sampled token under the *processed* sampling distribution, exactly 0.0 off the
    mask: the denominator of the importance ratio, always. `mask` lists action-token ranges; each action token is in
    exactly one `Span` of `versions` and in one `Turn`.

    Where the history was rewritten between two turns, or conversations took turns, a trajectory consists of several
    sequences, each whole: `sequences` lists those after the first, whose prompt is `prompt_ids`. Positions count
    through all of them.
    """

    index: U16
    status: MemberStatus
    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    mask: Annotated[tuple[Range, ...], Meta(max_length=4096)]
    versions: Annotated[tuple[Span, ...], Meta(max_length=256)]
    turns: Annotated[tuple[Turn, ...], Meta(max_length=1024)]
    reward: float
    scores: Annotated[dict[Word, float], Meta(max_length=64)]
    finish: Word
    sequences: Annotated[tuple[SequenceStart, ...], Meta(max_length=MAX_SEQUENCES - 1)] = ()
    sets: bytes = b""
    """The ids that each action token was drawn from (`messages.validate`); empty of the whole distribution."""
    agents: Annotated[tuple[Word, ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """The agent that read each sequence, the first one's too; empty where none has a name."""

    @property
    def cut(self) -> bool:
        """A limit of tokens or turns ended it, whether or not the environment judged what there was."""
        return self.status == MemberStatus.TRUNCATED or self.finish == "length"


NUM_FAILED_EPISODES = "num_failed_episodes"
"""Key of `Group.stats`."""


@message(4, TO_HUB)
class Group(Message):
    """Finished trajectories of a lease, or the lease handed back; `detail` is a failure in words, if there was one."""

    incarnation: U64
    seq: U64
    group_id: U64
    attempt: U16
    outcome: Outcome
    reason: ReturnReason
    detail: Text
    sampling: Sampling
    members: Annotated[tuple[Member, ...], Meta(max_length=1024)]
    stats: Annotated[dict[Word, float], Meta(max_length=64)]
    answers: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=1024)] = ()
    """Of an evaluation, the final answer of each member, for majority votes."""

    @property
    def num_failed_episodes(self) -> int:
        """Members that failed in their environment; not negative, whatever the actor sent."""
        return int(min(max(0.0, self.stats.get(NUM_FAILED_EPISODES, 0.0)), 1024.0))  # max(0.0, nan) is 0.0


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


class Rejection(Message):
    """A group that the ledger refused for good, and why."""

    seq: U64
    reason: int  # a RejectReason; a later release may know more of them, and an ack must not be lost for that
    detail: Annotated[str, Meta(max_length=256)]


@message(5, TO_ACTOR)
class Ack(Message):
    """The states of sent groups, batched. ACCEPTED: the ledger holds it. DURABLE: a published checkpoint covers it."""

    incarnation: U64
    settled_upto: U64
    accepted: Annotated[tuple[SeqRange, ...], Meta(max_length=256)]
    durable_upto: U64
    durable: Annotated[tuple[SeqRange, ...], Meta(max_length=256)]
    rejected: Annotated[tuple[Rejection, ...], Meta(max_length=64)]
