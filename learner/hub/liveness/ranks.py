"""Watch of the learner's process group from outside torch: which rank is dead, stopped or has failed, who waits.

A collective in which one rank is missing ends by torch's own time-out, after minutes and without a name. Every rank
sends beats from a thread of its own (`learner.ranks.beats`); a rank that is killed or stopped sends none. Pure but for
`process_state`, which is asked about processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamrl.messages import RankBeat
from streamrl.processes import host_id, process_state

PAUSE_S = 2.0
"""A hub whose own loop stood still for longer does not hold the silence of that time against the ranks."""
NO_BETTER_CAUSE_S = 3.0
"""After a collective failed, a dead rank is looked for; then the error itself is the cause."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why the group ends. `lost`: a rank was killed, stopped or cut off, so a new start may go well."""

    cause: str
    lost: bool
    kill: tuple[int, ...] = ()
    """Processes of this machine that cannot be told to exit."""


@dataclass(slots=True)
class Heard:
    """The last beat of a rank."""

    beat: RankBeat
    route: bytes
    at: float


class RankWatch:
    """Takes beats in, and gives at most one finding."""

    def __init__(self, silent_s: float, *, process_state: Callable[[int], str] = process_state) -> None:
        self._silent_s, self._process_state = silent_s, process_state
        self._host = host_id()
        self._heard: dict[int, Heard] = {}
        self._checked_at: float | None = None
        self._failed_at: float | None = None
        self.finding: Finding | None = None

    def beat(self, route: bytes, beat: RankBeat, now: float) -> None:
        if beat.failed and self._failed_at is None:
            self._failed_at = now
        old = self._heard.get(beat.rank)
        if old is None or not old.beat.failed:  # later beats of a rank that has failed add nothing
            self._heard[beat.rank] = Heard(beat, route, now)

    def routes(self) -> list[bytes]:
        """List the routes to which the order to end is sent."""
        return [one.route for one in self._heard.values() if not one.beat.closing]

    def check(self, now: float) -> Finding | None:
        """Return the finding, once, when it is made."""
        if self._checked_at is not None and now - self._checked_at > PAUSE_S:
            for one in self._heard.values():
                one.at += now - self._checked_at
        self._checked_at = now
        if self.finding is None:
            self.finding = self._judge(now)
            return self.finding
        return None

    def learner_gone(self, now: float) -> Finding | None:
        """Find that the process of rank 0 has ended without a shutdown message; None if it announced its end."""
        first = self._heard.get(0)
        if self.finding is None and first is not None and not (first.beat.closing or first.beat.failed):
            self.finding = Finding(f"{self._name(first)} was killed while in {_doing(first.beat)}", lost=True)
        return self.finding

    def sentences(self, now: float, waiting_for: str) -> list[tuple[str, str]]:
        """Describe every rank: (process, what it does or waits for)."""
        told = []
        for rank, one in sorted(self._heard.items()):
            told.append((f"learner rank {rank}" if one.beat.world > 1 else "learner", self._sentence(
                one, now, waiting_for
            )))
        return told

    def _sentence(self, one: Heard, now: float, waiting_for: str) -> str:
        beat, silent_s = one.beat, now - one.at
        if beat.closing:
            return "has ended"
        if beat.failed:
            return f"has failed: {beat.failed}"
        if silent_s > PAUSE_S:
            return f"has been silent for {silent_s:.0f} s{self._state(one)}; it was in {_doing(beat)}"
        if beat.collective:
            late = ", ".join(f"rank {rank}" for rank in self._awaited(one)) or "the others"
            return f"waits for {late} in {beat.collective} ({beat.phase}), {beat.collective_s:.1f} s so far"
        if beat.phase == "wait":
            return f"waits for a batch, {beat.phase_s:.1f} s so far: {waiting_for or 'it is on its way'}"
        return f"is in {beat.phase}, {beat.phase_s:.1f} s so far"

    def _awaited(self, waiting: Heard) -> list[int]:
        """List ranks that have entered fewer collectives than this one."""
        entered = waiting.beat.num_collectives
        return sorted(rank for rank, one in self._heard.items() if one.beat.num_collectives < entered)

    def _judge(self, now: float) -> Finding | None:
        open_ones = [one for _, one in sorted(self._heard.items()) if not one.beat.closing]
        if not open_ones or open_ones[0].beat.world == 1:
            return None
        for one in open_ones:
            beat = one.beat
            if beat.failed and not beat.in_group:
                return Finding(f"learner rank {beat.rank} failed in {beat.phase}: {beat.failed}", lost=False)
        gone = [one for one in open_ones if self._is_gone(one)]
        silent = [one for one in open_ones if self._silent_s and now - one.at > self._silent_s]
        if gone or silent:
            return self._lost(gone or silent, now)
        if self._failed_at is not None and now - self._failed_at > NO_BETTER_CAUSE_S:
            told = next(one for one in open_ones if one.beat.failed)
            return Finding(f"the learner's ranks lost each other: rank {told.beat.rank} failed in {_doing(told.beat)}: "
                           f"{told.beat.failed}", lost=True)
        return None

    def _lost(self, missing: list[Heard], now: float) -> Finding:
        parts = []
        for one in missing:
            what = "was killed" if self._is_gone(one) else f"has been silent for {now - one.at:.0f} s{self._state(one)}"
            parts.append(f"{self._name(one)} {what}; it was in {_doing(one.beat)}")
        waiting = [
            f"rank {rank} waits in {_doing(one.beat)}" for rank, one in sorted(self._heard.items())
            if one not in missing and not one.beat.closing
        ]
        here = tuple(one.beat.pid for one in missing if one.beat.host == self._host and not self._is_gone(one))
        return Finding("; ".join([*parts, *waiting]), lost=True, kill=here)

    def _is_gone(self, one: Heard) -> bool:
        return one.beat.host == self._host and self._process_state(one.beat.pid) in ("", "Z", "X")

    def _state(self, one: Heard) -> str:
        stopped = one.beat.host == self._host and self._process_state(one.beat.pid) in ("T", "t")
        return " and is stopped (SIGSTOP)" if stopped else ""

    def _name(self, one: Heard) -> str:
        where = "" if one.beat.host == self._host else f" on {one.beat.host.partition('/')[0]}"
        who = f"learner rank {one.beat.rank}" if one.beat.world > 1 else "the learner"
        return f"{who} (process {one.beat.pid}{where})"


def _doing(beat: RankBeat) -> str:
    return f"{beat.collective} ({beat.phase})" if beat.collective else beat.phase
