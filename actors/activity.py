"""An actor's periodic activity line: throughput, mean reward and failures since the last one."""

from __future__ import annotations

from streamrl.messages import Group, MemberStatus

EVERY_S = 10.0


class Activity:
    """Counts since the last line; `now` is in seconds, monotonic."""

    def __init__(self, now: float) -> None:
        self._said_at = now
        self._tokens_before = 0
        self._start_over()

    def _start_over(self) -> None:
        self._num_groups = self._num_failed = self._num_rewarded = 0
        self._reward = 0.0

    def add(self, group: Group) -> None:
        """A lease has ended, with all, some or none of its members."""
        finished = [member for member in group.members if member.status != MemberStatus.ABORTED]
        self._num_groups += bool(finished)
        self._num_failed += group.num_failed_episodes
        self._num_rewarded += len(finished)
        self._reward += sum(member.reward for member in finished)

    def line(self, now: float, tokens_total: int, version: object) -> str:
        """Describe the work since the last line; "" within `EVERY_S` of it, or if nothing was done."""
        passed = now - self._said_at
        if passed < EVERY_S:
            return ""
        tokens, self._tokens_before, self._said_at = tokens_total - self._tokens_before, tokens_total, now
        if not (self._num_groups or self._num_failed or tokens):
            return ""
        words = [f"{self._num_groups} groups", f"{tokens / passed:.0f} tokens/s"]
        words += [f"mean reward {self._reward / self._num_rewarded:.3g}"] if self._num_rewarded else []
        words += [f"{self._num_failed} episodes failed"] if self._num_failed else []
        self._start_over()
        return f"working: {', '.join(words)} in {passed:.0f} s, version {version}"
