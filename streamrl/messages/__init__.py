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

Wire form: `streamrl.codec` puts a 16-byte preamble before one MessagePack value. Structs are `array_like`, so a field's
position is its name: fields are only appended, with defaults, never removed, reordered or retyped inside a protocol
number. Token ids travel as raw `<i4`, log-probs as raw `<f4`; ranges are half open `(start, end)`.
"""

from __future__ import annotations

from streamrl.messages.actors import (
    ActorBeat,
    ActorState,
    Announce,
    Bye,
    Drain,
    Hello,
    HubBeat,
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
    SpanRow,
    Text,
    TurnRow,
    VersionRef,
    Word,
)
from streamrl.messages.ranks import (
    BatchShare,
    EvalRequest,
    EvalResult,
    Freeze,
    FrozenState,
    Halt,
    HubStatus,
    PlanRow,
    Publish,
    RankReady,
    RankWait,
    Saved,
    Shutdown,
    Take,
    Trained,
)
from streamrl.messages.sender import (
    SenderAbort,
    SenderDocument,
    SenderForm,
    SenderReport,
    SenderSend,
    SenderStage,
    SenderUp,
    SlotEnd,
    SlotFilled,
    SlotFree,
    SlotOpen,
)
from streamrl.messages.weights import (
    Chunk,
    ChunkStatus,
    DeltaIndex,
    Layout,
    Manifest,
    NcclState,
    NcclTicket,
    Offer,
    Probe,
    Pull,
    PullMode,
    SlotTicket,
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
    RejectReason,
    ReturnReason,
)

__all__ = [
    "Ack",
    "ActorBeat",
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
    "FrozenState",
    "Group",
    "HUB_TO_RANK",
    "HUB_TO_SENDER",
    "Halt",
    "Hello",
    "HubBeat",
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
    "RankWait",
    "RejectReason",
    "ReturnReason",
    "SLOT_TO_ACTOR",
    "SLOT_TO_SENDER",
    "Sampling",
    "Saved",
    "SenderAbort",
    "SenderDocument",
    "SenderForm",
    "SenderReport",
    "SenderSend",
    "SenderStage",
    "SenderUp",
    "SeqRange",
    "Shutdown",
    "SlotEnd",
    "SlotFilled",
    "SlotFree",
    "SlotOpen",
    "SlotTicket",
    "SpanRow",
    "Stop",
    "StopReason",
    "TO_ACTOR",
    "TO_HUB",
    "TO_WEIGHTS",
    "Take",
    "TensorSpec",
    "Text",
    "Trained",
    "TurnRow",
    "U16",
    "U32",
    "U64",
    "VersionRef",
    "Welcome",
    "Word",
]

TO_HUB: dict[int, type[Message]] = {
    1: Hello, 4: Group, 6: ActorBeat, 10: Installed, 11: Drain, 12: Bye,
}
TO_ACTOR: dict[int, type[Message]] = {
    2: Welcome, 3: Leases, 5: Ack, 6: HubBeat, 7: Announce, 11: Drain, 12: Bye, 13: Stop,
}
TO_WEIGHTS: dict[int, type[Message]] = {8: Pull}
FROM_WEIGHTS: dict[int, type[Message]] = {9: Chunk}
RANK_TO_HUB: dict[int, type[Message]] = {
    32: RankReady, 33: Take, 35: Trained, 36: Freeze, 38: Saved, 39: Publish, 40: Halt, 41: EvalRequest,
    45: Shutdown, 46: SenderUp, 51: SenderReport,
}
HUB_TO_RANK: dict[int, type[Message]] = {
    34: BatchShare, 37: FrozenState, 40: Halt, 42: EvalResult, 43: RankWait, 44: HubStatus,
}
HUB_TO_SENDER: dict[int, type[Message]] = {
    45: Shutdown, 47: SenderDocument, 48: SenderForm, 49: SenderSend, 50: SenderAbort,
}
SLOT_TO_SENDER: dict[int, type[Message]] = {56: SlotOpen, 58: SlotFree, 59: SlotEnd}
SLOT_TO_ACTOR: dict[int, type[Message]] = {57: SlotFilled, 59: SlotEnd}
