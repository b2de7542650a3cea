"""Every struct that crosses a process, and the words they use.

Glossary
    prompt        one record of the task, found by its index
    episode       one run of an environment from reset to end
    trajectory    one episode as tokens; on the wire a `Member` of a `Group`
    group         the trajectories of one prompt that share a baseline: the unit of leases, capacity and batches
    lease         the right and duty of one actor to produce one group; also the credit
    attempt       how often this group had been leased before, from 0
    version       number of optimizer steps done; a `VersionRef` adds the learner's epoch
    lag           version at training minus version that sampled the token, in optimizer steps
    verdict       what the ledger decides about an incoming group
    document      one version's weights as ordered bytes, described by a `Manifest`

Wire form: `messages.codec` puts a 16-byte preamble before one MessagePack value. Structs are `array_like`, so a field's
position is its name: fields are only appended, with defaults, never removed, reordered or retyped inside a protocol
number. Token ids travel as raw `<i4`, log-probs as raw `<f4`; ranges are half open `(start, end)`.
"""

from __future__ import annotations

from streamrl.messages.actors import (
    ActorHeartbeat,
    ActorState,
    Announce,
    Bye,
    Drain,
    Hello,
    HubHeartbeat,
    Installed,
    InstallSource,
    Limits,
    Probed,
    Stop,
    StopReason,
    Welcome,
)
from streamrl.messages.base import (
    EVAL_BIT,
    PROTOCOL,
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
)
from streamrl.messages.broadcaster import (
    BroadcastAbort,
    BroadcastDocument,
    BroadcastForm,
    BroadcastReport,
    BroadcastSend,
    BroadcastStage,
    BroadcastUp,
    IpcBufferEnd,
    IpcBufferFilled,
    IpcBufferFree,
    IpcBufferOpen,
)
from streamrl.messages.ranks import (
    BatchPending,
    BatchRequest,
    BatchShare,
    EvalRequest,
    EvalResult,
    HubStatus,
    PlanRow,
    Publish,
    RankReady,
    Saved,
    Shutdown,
    Snapshot,
    SnapshotRequest,
    StepDone,
    StopRequest,
)
from streamrl.messages.weights import (
    Chunk,
    ChunkStatus,
    DeltaIndex,
    IpcBufferTicket,
    Layout,
    Manifest,
    NcclState,
    NcclTicket,
    Offer,
    Probe,
    Pull,
    PullMode,
    TensorSpec,
)
from streamrl.messages.work import (
    Ack,
    Group,
    Lease,
    Leases,
    Member,
    MemberStatus,
    Outcome,
    Purpose,
    Rejection,
    RejectReason,
    ReturnReason,
    Span,
    Turn,
)

__all__ = [
    "Ack",
    "ActorHeartbeat",
    "ActorState",
    "Announce",
    "BatchShare",
    "Bye",
    "Chunk",
    "ChunkStatus",
    "DeltaIndex",
    "Digest",
    "Drain",
    "EVAL_BIT",
    "EvalRequest",
    "EvalResult",
    "FROM_WEIGHTS",
    "Freeze",
    "Snapshot",
    "Group",
    "HUB_TO_RANK",
    "HUB_TO_SENDER",
    "Halt",
    "Hello",
    "HubHeartbeat",
    "HubStatus",
    "Id",
    "InstallSource",
    "Installed",
    "Layout",
    "Lease",
    "LeaseRef",
    "Leases",
    "Limits",
    "Lineage",
    "LongText",
    "Manifest",
    "Member",
    "MemberStatus",
    "Message",
    "NcclState",
    "NcclTicket",
    "Offer",
    "Outcome",
    "PROTOCOL",
    "PlanRow",
    "Probe",
    "Probed",
    "Publish",
    "Pull",
    "PullMode",
    "Purpose",
    "RANK_TO_HUB",
    "Range",
    "RankReady",
    "BatchPending",
    "RejectReason",
    "Rejection",
    "ReturnReason",
    "SLOT_TO_ACTOR",
    "SLOT_TO_SENDER",
    "Sampling",
    "Saved",
    "BroadcastAbort",
    "BroadcastDocument",
    "BroadcastForm",
    "BroadcastReport",
    "BroadcastSend",
    "BroadcastStage",
    "BroadcastUp",
    "SeqRange",
    "Shutdown",
    "IpcBufferEnd",
    "IpcBufferFilled",
    "IpcBufferFree",
    "IpcBufferOpen",
    "IpcBufferTicket",
    "Span",
    "Stop",
    "StopReason",
    "TO_ACTOR",
    "TO_HUB",
    "TO_WEIGHTS",
    "Take",
    "TensorSpec",
    "Text",
    "Trained",
    "Turn",
    "U16",
    "U32",
    "U64",
    "VersionRef",
    "Welcome",
    "Word",
]

TO_HUB: dict[int, type[Message]] = {
    1: Hello, 4: Group, 6: ActorHeartbeat, 10: Installed, 11: Drain, 12: Bye,
}
TO_ACTOR: dict[int, type[Message]] = {
    2: Welcome, 3: Leases, 5: Ack, 6: HubHeartbeat, 7: Announce, 11: Drain, 12: Bye, 13: Stop,
}
TO_WEIGHTS: dict[int, type[Message]] = {8: Pull}
FROM_WEIGHTS: dict[int, type[Message]] = {9: Chunk}
RANK_TO_HUB: dict[int, type[Message]] = {
    32: RankReady, 33: BatchRequest, 35: StepDone, 36: SnapshotRequest, 38: Saved, 39: Publish, 40: StopRequest,
    41: EvalRequest, 45: Shutdown, 46: BroadcastUp, 51: BroadcastReport,
}
HUB_TO_RANK: dict[int, type[Message]] = {
    34: BatchShare, 37: Snapshot, 40: StopRequest, 42: EvalResult, 43: BatchPending, 44: HubStatus,
}
HUB_TO_SENDER: dict[int, type[Message]] = {
    45: Shutdown, 47: BroadcastDocument, 48: BroadcastForm, 49: BroadcastSend, 50: BroadcastAbort,
}
SLOT_TO_SENDER: dict[int, type[Message]] = {56: IpcBufferOpen, 58: IpcBufferFree, 59: IpcBufferEnd}
SLOT_TO_ACTOR: dict[int, type[Message]] = {57: IpcBufferFilled, 59: IpcBufferEnd}
