"""Answers to a group, and the reasons for which one comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamrl.messages import Group, Outcome, RejectReason, ReturnReason
from streamrl.messages.validate import MemberSummary

DROP_AT_ONCE = (ReturnReason.TOO_LONG, ReturnReason.PROMPT_INVALID, ReturnReason.POISON)
"""Faults of the prompt: no other actor could do better."""
NOT_A_FAILURE = (ReturnReason.DRAIN, ReturnReason.NO_SLOT)
"""Reasons that have nothing to do with the group."""

Summaries = tuple[MemberSummary, ...]


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """The answer to a group: accepted; rejected, with its reason; repeat (answered again); no_link (send STOP).

    `strike` marks what no honest actor would send.
    """

    kind: Literal["accepted", "rejected", "repeat", "no_link"]
    reason: RejectReason = RejectReason.NONE
    detail: str = ""
    strike: bool = False


class Refused(Exception):
    """Raised where a group is rejected."""

    def __init__(self, reason: RejectReason, detail: str, *, strike: bool = False) -> None:
        super().__init__(detail)
        self.result = AcceptResult("rejected", reason, detail, strike)


def is_failure(group: Group) -> bool:
    """Return whether an attempt that left members missing counts against the group."""
    return group.outcome != Outcome.RETURNED or group.reason not in NOT_A_FAILURE
