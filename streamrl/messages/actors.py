"""Between actors and the hub: joining, heartbeats, installs, leaving; then leases, groups, accept results."""

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
    Digest,
    Id,
    LeaseRef,
    Lineage,
    LongText,
    Message,
    Range,
    Sampling,
    SeqRange,
    Text,
    VersionRef,
    Word,
    message,
)
from streamrl.messages.weights import Base, Layout, Manifest, NcclState, Offer


class Limits(Message):
    """Time limits, sizes and bounds that the hub sets for every actor."""

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
    """Action tokens of one member over its whole episode, all turns together."""
    vocab_size: U32 = 1 << 31
    max_lag: U32 = 1 << 31
    max_sequences: U16 = 1
    """Sequences of one trajectory; a hub that does not know of several leaves it at one."""
    eval_progress_deadline_s: float = 0.0
    """`progress_deadline_s` of evaluation leases, whose answers may be longer; 0 is the same."""
    max_trajectory_tokens: U32 = 1 << 31
    """Of one training trajectory: the prompts of all its sequences and every token after them, observations too."""


@message(1, TO_HUB)
class Hello(Message):
    """First message of every session: identity, abilities, and the leases and groups that the actor still holds."""

    protocol_min: U16
    protocol_max: U16
    actor_id: Id
    incarnation: U64
    run_id: Id | None
    engine: Word
    software: Id
    max_leases: U16
    transports: Annotated[tuple[str, ...], Meta(max_length=8)]
    installed: tuple[VersionRef, Digest] | None
    held: Annotated[tuple[LeaseRef, ...], Meta(max_length=1024)]
    outbox: Annotated[tuple[SeqRange, ...], Meta(max_length=1024)]
    next_seq: U64
    device: Id = ""
    """UUID of the GPU that the engine is on; empty on a CPU."""


@message(2, TO_ACTOR)
class Welcome(Message):
    """Answer to HELLO: run, limits, task, layout, current manifest, and the settled groups."""

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
    base: Base | None = None
    """What `layout` and `manifest` are an adapter of; None if they are the whole model."""
    turn: U64 = 0
    """The turn, as in HubHeartbeat."""


SLOW_CALL_S = 10.0
"""A call of an environment that runs for longer is reported on the terminal."""
SLOW_CALLS, SLOWEST_CALL_S, HUNG_CALLS, ANSWERED_STEPS = "slow_calls", "slowest_call_s", "hung_calls", "answered_steps"
"""Names in a heartbeat's `stats`: slow calls now, seconds of the longest, calls given up so far, steps that returned or
raised so far."""


SANDBOX_LEVEL = "sandbox_level"
"""Another: the lowest level of sandbox that programs of the model have had at this actor; 0 if there were none."""


class ActorState(IntEnum):
    CONNECTING = 0
    SYNCING = 1
    RUNNING = 2
    DISCONNECTED = 3
    DRAINING = 4
    LEAVING = 5
    CLOSED = 6


@message(6, TO_HUB)
class ActorHeartbeat(Message):
    """Liveness, load and progress of one actor."""

    incarnation: U64
    beat: U64
    state: ActorState
    free: U16
    running: U16
    installed: VersionRef | None
    tokens_total: U64
    stuck: Annotated[tuple[LeaseRef, ...], Meta(max_length=64)]
    outbox_groups: U16
    outbox_bytes: U64
    free_eval: U16 = 0
    stats: Annotated[dict[Word, float], Meta(max_length=64)] = {}
    max_leases: U16 = 0
    """Most training leases at once, known with the run's sizes; 0 leaves the number in HELLO."""
    root: Annotated[bytes, Meta(max_length=16)] = b""
    """Root of the version in `installed`; empty without one."""
    nccl: NcclState | None = None
    """Progress with the communicators that it was invited to; None without any."""
    held: Annotated[tuple[LeaseRef, ...], Meta(max_length=1024)] | None = None
    """Leases in progress here; None if they are too many to list."""
    turn: U64 = 0
    """The learner's turn for which the engine gave its memory back; 0 while it holds any."""


@message(6, TO_ACTOR)
class HubHeartbeat(Message):
    """Liveness of the hub, the learner's wait, and the oldest version that is still useful."""

    beat: U64
    learner_epoch: U32
    version: U64
    min_useful: VersionRef
    waiting_for: Annotated[str, Meta(max_length=128)]
    turn: U64 = 0
    """The turn, where a GPU is shared so: odd is the learner's, even the actors'. 0: all work at once."""


@message(7, TO_ACTOR)
class Announce(Message):
    """A new version, and offers of it, best first."""

    manifest: Manifest
    offers: Annotated[tuple[Offer, ...], Meta(max_length=8)]


class InstallSource(IntEnum):
    SAME = 0
    SHM = 1
    ZMQ = 2
    ZMQ_DELTA = 3
    NCCL = 4
    IPC = 5
    OTHER = 6
    """A user's own transport."""


class Probed(Message):
    """Comparison of an engine's log-probs with the learner's; `failed` is "" for a healthy one.

    `mean` and `largest` are absolute differences in nats; None without a probe in the manifest, or where the engine
    cannot score tokens.
    """

    mean: float | None
    largest: float | None
    failed: LongText
    probe_s: float


@message(10, TO_HUB)
class Installed(Message):
    """Report of one install: the version is live, or the reason why not."""

    target: VersionRef
    root: Digest
    ok: bool
    source: InstallSource
    transfer_s: float
    verify_s: float
    pause_s: float
    install_s: float
    nbytes: U64
    error: LongText
    probe: Probed | None = None


@message(11, TO_HUB, TO_ACTOR)
class Drain(Message):
    """Finish the leases in progress, take no more."""

    reason: Id
    deadline_s: float
    until: Annotated[int, Meta(ge=0, le=1)] = 1


@message(12, TO_HUB, TO_ACTOR)
class Bye(Message):
    """Everything is settled; the session closes."""

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


@message(13, TO_ACTOR)
class Stop(Message):
    """End of a session: refused, fenced or finished; with `rejoin`, HELLO is expected again."""

    reason: StopReason
    rejoin: bool
    retry_after_s: float
    exit_code: Annotated[int, Meta(ge=0, le=255)]
    detail: Text


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
    samplings: Annotated[tuple[Sampling, ...], Meta(max_length=1024)] = ()
    """The sampling of each member in place of `sampling`, which then names its own; empty where all are alike."""

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
    score: float | None = None
    """The environment's score of the turn, where that is another number than its reward."""
    finish: Word = ""
    """Reason why the turn ended: stop, length or abort; empty from an actor that does not say."""


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
    sampling: Sampling | None = None
    """Sampling of its tokens, where a lease had `samplings`; None is the group's."""

    @property
    def cut(self) -> bool:
        """A limit of tokens or turns ended it, whether or not the environment judged what there was."""
        return self.status == MemberStatus.TRUNCATED or self.finish == "length"


NUM_FAILED_EPISODES, FINISHED_AT = "num_failed_episodes", "finished_at"
"""Keys of `Group.stats`; the second is the actor's clock when the group was whole, in seconds since 1970."""


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
    """The final answer of each member of an evaluation, for majority votes."""

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """Every distribution that tokens of the group were drawn from, its own first."""
        return self.sampling, *(one.sampling for one in self.members if one.sampling is not None)

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
