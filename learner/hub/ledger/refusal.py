"""Reasons to refuse a group whatever its lease: contents, sampling and versions that no leased group can have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from learner.hub.ledger.tables.versions import Versions
from streamrl.errors import ContentError
from streamrl.messages import Group, Limits, Outcome, RejectReason, ReturnReason, Sampling
from streamrl.messages.validate import MemberSummary, check_group, is_scorable

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


@dataclass
class GroupChecks:
    """The tests that training and evaluation groups share; each raises Refused."""

    limits: Limits
    counts: Counter[str]
    versions: Versions

    def content(self, group: Group, leased: Collection[int]) -> Summaries:
        """Check the rules of `streamrl.messages.validate`; returns a summary of each member."""
        try:
            return check_group(group, self.limits, leased)
        except ContentError as error:
            self.counts[f"num_malformed_{error.check}"] += 1
            raise Refused(RejectReason.MALFORMED, f"{error.check}: {error}", strike=True) from error

    def sampling(self, group: Group, leased: Sampling, *, or_scorable: bool = False) -> None:
        """Check that answers were drawn as the lease asked, or with `or_scorable` in any way that can be scored."""
        if not group.members or group.sampling == leased or (or_scorable and is_scorable(group.sampling)):
            return
        self.counts["num_malformed_sampling"] += 1
        detail = f"sampling: group {group.group_id} was drawn with {group.sampling}, the lease asked for {leased}"
        raise Refused(RejectReason.MALFORMED, detail, strike=True)

    def versions_known(self, group: Group, summaries: Summaries) -> None:
        """Check that no token is of the future, or of a branch of the run that a crash has cut off."""
        for one in summaries:
            for ref in one.all_versions:
                if self.versions.usable(ref) is None:
                    raise Refused(
                        RejectReason.VERSION,
                        f"group {group.group_id} member {one.index} has tokens of version {ref}, which is not in "
                        f"this history (now {self.versions.ref})",
                    )


def is_failure(group: Group) -> bool:
    """Return whether an attempt that left members missing counts against the group."""
    return group.outcome != Outcome.RETURNED or group.reason not in NOT_A_FAILURE
