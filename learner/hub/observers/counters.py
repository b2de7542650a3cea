"""Observers: objects that take note of what actors do, for metrics and warnings; none of them decides anything."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from learner.hub.ledger.tables.filters import dropped_by
from streamrl.messages import (
    ANSWERED_STEPS,
    EVAL_BIT,
    HUNG_CALLS,
    SANDBOX_LEVEL,
    SLOW_CALL_S,
    SLOW_CALLS,
    SLOWEST_CALL_S,
    Group,
    Hello,
    MemberStatus,
    ReturnReason,
)
from streamrl.messages.printable import printable
from streamrl.metrics.names import ARRIVED
from streamrl.metrics.summary import WEAK_SANDBOX


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group that the ledger has accepted, or refused for its age alone: well-formed, and no repetition."""

    actor_id: str
    group: Group
    num_bytes: int = 0
    """Size of the message on the wire."""
    accepted: bool = True
    num_open: int = 0
    """Groups that actors work on now."""


class Observer:
    """Base of observers: an event that a class does not need is ignored.

    Attributes:
        fatal: why the run must stop; "" while it need not.
    """

    fatal: str = ""

    def joined(self, hello: Hello, *, is_new: bool) -> None:
        """An actor was let in; `is_new` tells a new process from one that was here before."""

    def group(self, arrival: Arrival) -> None:
        """A group has arrived."""

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        """An actor has sent the numbers of a heartbeat."""

    def remove(self, actor_id: str) -> None:
        """An actor has left or was evicted."""

    def metrics(self) -> dict[str, float]:
        """Report counters for the learner's metrics."""
        return {}


SUMS = {
    "up_s": "actor_s", "idle_s": "actor_idle_s", "starved_s": "actor_starved_s", "paused_s": "actor_paused_s",
    "generation_s": "episode_generation_s", "environment_s": "episode_environment_s",
}
"""Name in a heartbeat's `stats` -> name among the hub's counters; seconds since the actor was ready."""
LARGEST = {
    "env_step_p95_s": "env_step_p95_s", "host_cpu_percent": "actor_cpu_percent", "rss_bytes": "actor_rss_bytes",
    "gpu_percent": "actor_gpu_percent", "gpu_used_bytes": "actor_gpu_used_bytes",
    "host_memory_percent": "actor_memory_percent", "given_back_bytes": "actor_given_back_bytes",
}
"""The same of numbers of which the hub tells the largest of all actors, as of the slowest or busiest one."""


class ActorLoads(Observer):
    """Use of actors' time, and the lowest level of their sandboxes.

    Adds what each heartbeat tells beyond the one before, so that actors may come and go.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(SUMS.values(), 0.0)
        self._before: dict[str, Mapping[str, float]] = {}  # by the actor's name
        self._newest: dict[str, Mapping[str, float]] = {}

    def joined(self, hello: Hello, *, is_new: bool) -> None:
        if is_new and hello.run_id is None:  # it has done nothing yet: all that it tells from now on counts
            self._before[hello.actor_id] = {}

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        if "up_s" not in stats:  # a relay, or an actor that is still loading
            return
        before = self._before.get(actor_id)
        self._before[actor_id] = stats
        self._newest[actor_id] = stats
        if before is None:  # an actor of an earlier start of the learner: what it did before does not count here
            return
        for name, total in SUMS.items():
            self._sums[total] += max(0.0, stats.get(name, 0.0) - before.get(name, 0.0))

    def remove(self, actor_id: str) -> None:
        """Drop a departed actor's counters."""
        self._before.pop(actor_id, None)
        if len(self._newest) > 1:  # of the last one they stay: the end of the run is reported after it
            self._newest.pop(actor_id, None)

    def metrics(self) -> dict[str, float]:
        """Report sums over the actors, and the largest of some numbers."""
        largest = {name: max((one.get(key, 0.0) for one in self._newest.values()), default=0.0)
                   for key, name in LARGEST.items()}
        return {**self._sums, **largest}


class SandboxLevels(Observer):
    """Keeps the lowest sandbox level of any actor, 0 while no program has run; warns at the first that is weak."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify, self._lowest = notify, 0

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        level = int(stats.get(SANDBOX_LEVEL, 0))
        if level in (1, 2) and (not self._lowest or level < self._lowest):
            self._lowest = level
            if level == 1:
                self._notify(f"{actor_id}: {WEAK_SANDBOX}. See docs/sandbox.md")

    def metrics(self) -> dict[str, float]:
        return {"sandbox_level": float(self._lowest)}


PART, MAX_SUMS = "part_", 100
"""Prefix of a part of the reward; actors may name so many that no more are told apart."""
ENOUGH_GROUPS = 8
ENOUGH_STEPS = 3


class Arrivals(Observer):
    """Training groups that are well-formed and no repetition, also those that are too old to be trained on."""

    def __init__(self) -> None:
        names = ("trajectories", "reward", "reward_squared", "score", "tokens", "bytes", "failed_groups", "cut",
                 "temperature")
        self._sums = Counter(dict.fromkeys(names, 0.0))
        self._lowest, self._highest = math.inf, -math.inf

    @property
    def equal_reward(self) -> float | None:
        """The reward of every trajectory so far; None before the first, and if they differ."""
        return self._lowest if self._lowest == self._highest else None

    def group(self, arrival: Arrival) -> None:
        group = arrival.group
        if group.group_id & EVAL_BIT:
            return
        members = [member for member in group.members if member.status != MemberStatus.ABORTED]
        rewards = [member.reward for member in members]
        self._lowest, self._highest = min([self._lowest, *rewards]), max([self._highest, *rewards])
        self._sums.update(
            trajectories=len(members), reward=sum(rewards), reward_squared=sum(reward * reward for reward in rewards),
            score=sum(member.scores.get("score", member.reward) for member in members),
            tokens=sum(end - start for member in members for start, end in member.mask), bytes=arrival.num_bytes,
            failed_groups=bool(group.num_failed_episodes), cut=sum(member.cut for member in members),
            temperature=sum((member.sampling or group.sampling).temperature for member in members),
        )
        for name, value in ((name, value) for member in members for name, value in member.scores.items()):
            if name != "score" and (PART + name in self._sums or len(self._sums) < MAX_SUMS):
                self._sums[PART + name] += value

    def metrics(self) -> dict[str, float]:
        return {ARRIVED + name: value for name, value in self._sums.items()}


def all_dropped(counts: Counter[str], reward: float | None) -> str:
    """Say that so many groups were finished and a filter dropped every one of them; "" before.

    Args:
        reward: of every trajectory; None if they differ.
    """
    num, filters = dropped_by(counts)
    if num < ENOUGH_GROUPS or num < counts["num_groups_completed"]:
        return ""
    why = f"every reward was {reward:g}" if reward is not None else "see the rewards of each group"
    return f"{num} groups finished, all dropped by {filters}: {why}; see streamrl samples"


def all_equal(counts: Counter[str], reward: float | None, *, batch_size: int) -> str:
    """Say that so many batches went by in which every reward was the same; "" before, or if they differ."""
    num_steps = counts["num_groups_trained"] // batch_size
    if reward is None or num_steps < ENOUGH_STEPS:
        return ""
    return (f"{num_steps} steps, and every reward was {reward:g}: equal rewards teach nothing; see "
            "streamrl samples, and check the reward and the answers in the data")


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


@dataclass(slots=True)
class Tally:
    """Episodes of one kind that failed and prompts that came back, and whether any episode came through."""

    kind: str = ""
    num_failed: int = 0
    num_unusable: int = 0
    any_came: bool = False


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
        self._all, self._training = Tally(), Tally("training ")  # an evaluation that came through excuses no training
        self._reported: set[ReturnReason] = set()
        self._recent: deque[bool] = deque(maxlen=NUM_RECENT)
        self._alarmed = False

    def group(self, arrival: Arrival) -> None:
        """Count an accepted group, also one that was handed back."""
        if not arrival.accepted:
            return
        group, num_open = arrival.group, arrival.num_open
        num_failed, detail = group.num_failed_episodes, printable(group.detail)
        tallies = [self._all] if group.group_id & EVAL_BIT else [self._all, self._training]
        if detail and not num_failed and group.reason not in NOT_OF_THE_TASK:
            self._handed_back(group.reason, detail, num_open, tallies)
        for tally in tallies:
            tally.any_came |= any(member.status != MemberStatus.ABORTED for member in group.members)
            tally.num_failed += num_failed
        self._recent += [True] * num_failed + [False] * (len(group.members) - num_failed)
        if num_failed:
            self.last = detail
            if not self.first:
                self.first = detail
                self._notify(f"an episode failed: {detail}")
        self._check_share()
        under_way = num_open * max(num_failed, len(group.members))
        for tally in tallies:
            if tally.num_failed >= max(NUM_FIRST, 2 * under_way) and not tally.any_came and not self.fatal:
                what = f"{tally.num_failed} {tally.kind}episodes"
                self.fatal = f"all of the first {what} failed, so the run stops: {self.last}"
                self._notify(self.fatal)

    def _handed_back(self, reason: ReturnReason, detail: str, num_open: int, tallies: Sequence[Tally]) -> None:
        """Report the first lease that came back for each other reason (prompt too long, engine error ...)."""
        self.last = detail
        for tally in tallies:
            tally.num_unusable += reason in FAULTS_OF_PROMPT
            if tally.num_unusable >= max(NUM_FIRST, 2 * num_open) and not tally.any_came and not self.fatal:
                what = f"{tally.num_unusable} {tally.kind}prompts"
                self.fatal = f"all of the first {what} came back, so the run stops: {detail}"
                self._notify(self.fatal)
        if reason not in self._reported:
            self._reported.add(reason)
            self._notify(f"a lease came back ({reason.name.lower()}): {detail}")
        if self._stop_at_long_prompt and reason == ReturnReason.TOO_LONG and not self.fatal:
            self.fatal = f"data.prompt_overflow=error, so the run stops: {detail}"
            self._notify(self.fatal)

    def _check_share(self) -> None:
        share = sum(self._recent) / NUM_RECENT
        if share < CALM_SHARE:
            self._alarmed = False
        elif share > ALARM_SHARE and len(self._recent) == NUM_RECENT and not self._alarmed:
            self._alarmed = True
            self._notify(f"{share:.0%} of the last {NUM_RECENT} episodes failed: {self.last}")


REPEAT_S = 60.0
"""The shortest time between two reports of slow calls."""
LAST_CHANCE_S = 10.0
"""From the first call that was given up: if no step has returned by then, the run stops."""


class HungCalls(Observer):
    """Keeps what heartbeats say of calls of environments, by actor.

    Attributes:
        fatal: why the run must stop; "" while it need not.
    """

    def __init__(self, notify: Callable[[str], None], *, task: str, limit_s: float) -> None:
        self.fatal = ""
        self._notify = notify
        self._of, self._limit = f"of the environment of task {task}", f"env.step_timeout_s={limit_s:g}"
        self._stats: dict[str, Mapping[str, float]] = {}
        self._sums = Counter[str]()  # over the actors: thousands of them beat, and each beat asks for all
        self._told_at: float | None = None
        self._hung_at: float | None = None

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        self.remove(actor_id)
        self._stats[actor_id] = stats
        self._add(stats, 1)
        self._check_slow(now)
        self._check_hung(now)

    def remove(self, actor_id: str) -> None:
        self._add(self._stats.pop(actor_id, {}), -1)

    def _check_slow(self, now: float) -> None:
        num_slow = self._sums[SLOW_CALLS]
        if num_slow and (self._told_at is None or now - self._told_at > REPEAT_S):
            self._told_at = now
            longest = max(stats.get(SLOWEST_CALL_S, 0.0) for stats in self._stats.values())
            calls = "call" if num_slow == 1 else "calls"
            self._notify(
                f"{num_slow} {calls} {self._of} still running after {max(longest, SLOW_CALL_S):.0f} s; the limit is "
                f"{self._limit}"
            )

    def _check_hung(self, now: float) -> None:
        num_hung = self._sums[HUNG_CALLS]
        if not num_hung or self._sums[ANSWERED_STEPS]:
            return
        if self._hung_at is None:
            self._hung_at = now
        elif now - self._hung_at > LAST_CHANCE_S and not self.fatal:
            self.fatal = (
                f"every call {self._of} hangs, so the run stops: {num_hung} timed out after {self._limit} and none "
                "has returned; fix what they wait for, or raise that limit"
            )
            self._notify(self.fatal)

    def _add(self, stats: Mapping[str, float], sign: int) -> None:
        for name in (SLOW_CALLS, HUNG_CALLS, ANSWERED_STEPS):
            self._sums[name] += sign * int(stats.get(name, 0.0))
