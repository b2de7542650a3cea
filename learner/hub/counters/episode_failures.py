"""Failed episodes of a run: the first in words, an alarm when their share rises, and the end if nothing else comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from learner.hub.counters.observer import Arrival, Observer
from streamrl.messages import MemberStatus, ReturnReason
from streamrl.messages.printable import printable

NUM_FIRST = 32
"""If so many episodes fail before one comes through, and twice as many as are under way, the run stops: where many
actors begin at once, the first to report are those that fail early."""
NUM_RECENT = 200
ALARM_SHARE, CALM_SHARE = 0.2, 0.1
"""Of the recent episodes: the warning comes above the one, and again only after the share was below the other."""
FAULTS_OF_PROMPT = (ReturnReason.TOO_LONG, ReturnReason.PROMPT_INVALID)
"""Prompts that come back for these reasons would come back from any actor."""
NOT_OF_THE_TASK = (ReturnReason.DRAIN, ReturnReason.STALE, ReturnReason.NO_SLOT)
"""Leases that come back for these reasons tell nothing of the task."""


class EpisodeFailures(Observer):
    """Counts failures in environments and prompts that cannot be used, as accepted groups report them.

    Args:
        notify: told what a person must see.
        stop_at_long_prompt: the first prompt that is too long ends the run.

    Attributes:
        first, last: failures in words, "" without any; `last` may also be another reason why a lease came back.
        fatal: why the run must stop; "" while it need not.
    """

    def __init__(self, notify: Callable[[str], None], *, stop_at_long_prompt: bool = False) -> None:
        self.first = self.last = self.fatal = ""
        self._stop_at_long_prompt = stop_at_long_prompt
        self._notify = notify
        self._num_failed = self._num_unusable = 0
        self._reported: set[ReturnReason] = set()
        self._any_came = False
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)
        self._alarmed = False

    def group(self, arrival: Arrival) -> None:
        """Count an accepted group, also one that was handed back."""
        if not arrival.accepted:
            return
        group, num_open = arrival.group, arrival.num_open
        num_failed, detail = group.num_failed_episodes, printable(group.detail)
        if detail and not num_failed and group.reason not in NOT_OF_THE_TASK:
            self._handed_back(group.reason, detail, num_open)
        self._any_came |= any(member.status != MemberStatus.ABORTED for member in group.members)
        self._num_failed += num_failed
        self._recent += [True] * num_failed + [False] * (len(group.members) - num_failed)
        if num_failed:
            self.last = detail
            if not self.first:
                self.first = detail
                self._notify(f"an episode failed: {detail}")
        self._check_share()
        under_way = num_open * max(num_failed, len(group.members))
        if self._num_failed >= max(NUM_FIRST, 2 * under_way) and not self._any_came and not self.fatal:
            self.fatal = f"all of the first {self._num_failed} episodes failed, the run stops: {self.last}"
            self._notify(self.fatal)

    def _handed_back(self, reason: ReturnReason, detail: str, num_open: int) -> None:
        """Report the first lease that came back for each other reason (prompt too long, engine error ...)."""
        self.last = detail
        self._num_unusable += reason in FAULTS_OF_PROMPT
        if self._num_unusable >= max(NUM_FIRST, 2 * num_open) and not self._any_came and not self.fatal:
            self.fatal = f"all of the first {self._num_unusable} prompts came back, the run stops: {detail}"
            self._notify(self.fatal)
        if reason not in self._reported:
            self._reported.add(reason)
            self._notify(f"a lease came back ({reason.name.lower()}): {detail}")
        if self._stop_at_long_prompt and reason == ReturnReason.TOO_LONG and not self.fatal:
            self.fatal = f"data.prompt_overflow=error, the run stops: {detail}"
            self._notify(self.fatal)

    def _check_share(self) -> None:
        share = sum(self._recent) / NUM_RECENT
        if share < CALM_SHARE:
            self._alarmed = False
        elif share > ALARM_SHARE and len(self._recent) == NUM_RECENT and not self._alarmed:
            self._alarmed = True
            self._notify(f"{share:.0%} of the last {NUM_RECENT} episodes failed: {self.last}")
