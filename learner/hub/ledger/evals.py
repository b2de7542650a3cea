"""Evaluation groups: one member each, outside capacity and age, never trained on, forgotten with the learner.

Their numbers carry `EVAL_BIT`, the evaluation's id and the prompt's index, so nothing about them needs a table on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan

from learner.hub.ledger.groups import OpenLease
from streamrl.messages import EVAL_BIT, MemberStatus
from streamrl.messages.validate import MemberSummary

MAX_FINISHED = 8
"""Finished evaluations whose result can still be asked for."""


@dataclass(frozen=True, slots=True)
class EvalOutcome:
    """How an evaluation stands. Means are over `num_scored` prompts, NaN while there are none; tokens are actions."""

    eval_id: int
    version: int
    num_prompts: int
    num_scored: int
    num_failed: int
    score: float
    reward: float
    mean_tokens: float
    truncated_fraction: float
    scores: Mapping[str, float]  # mean of each named score over the prompts that have it

    @property
    def done(self) -> bool:
        return self.num_scored + self.num_failed == self.num_prompts


@dataclass(slots=True)
class EvalItem:
    """One prompt of an evaluation."""

    next_attempt: int = 0
    num_failures: int = 0
    lease: OpenLease | None = None
    grants: dict[int, str] = field(default_factory=dict)
    facts: MemberSummary | None = None
    failed: bool = False

    @property
    def open(self) -> bool:
        return self.facts is None and not self.failed


@dataclass(slots=True)
class EvalRun:
    eval_id: int
    version: int
    items: list[EvalItem]
    waiting: list[int]  # indices to lease, last one first

    def outcome(self) -> EvalOutcome:
        facts = [item.facts for item in self.items if item.facts is not None]
        num = len(facts)
        return EvalOutcome(
            eval_id=self.eval_id, version=self.version, num_prompts=len(self.items), num_scored=num,
            num_failed=sum(item.failed for item in self.items),
            score=sum(one.scores.get("score", one.reward) for one in facts) / num if num else nan,
            reward=sum(one.reward for one in facts) / num if num else nan,
            mean_tokens=sum(one.num_action_tokens for one in facts) / num if num else nan,
            truncated_fraction=sum(one.status == MemberStatus.TRUNCATED for one in facts) / num if num else nan,
            scores=_mean_scores(facts),
        )


def _mean_scores(facts: Sequence[MemberSummary]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in facts:
        for name, value in one.scores.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


class EvalTable:
    """Evaluations under way, oldest first, and the last few that ended."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._runs: OrderedDict[int, EvalRun] = OrderedDict()

    def request(self, eval_id: int, version: int, num_prompts: int) -> None:
        """Start one.

        Raises:
            ValueError: the id is in use, or there is nothing to score.
        """
        if eval_id in self._runs:
            raise ValueError(f"evaluation {eval_id} was already asked for: use a new id")
        if num_prompts < 1:
            raise ValueError(f"evaluation {eval_id} has num_prompts={num_prompts}: ask for at least one")
        items = [EvalItem() for _ in range(num_prompts)]
        self._runs[eval_id] = EvalRun(eval_id, version, items, list(range(num_prompts - 1, -1, -1)))
        finished = [key for key, run in self._runs.items() if run.outcome().done]
        for key in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self._runs[key]

    def outcome(self, eval_id: int) -> EvalOutcome | None:
        run = self._runs.get(eval_id)
        return run.outcome() if run is not None else None

    def next_for(self, version: int) -> tuple[int, int] | None:
        """(group_id, version asked for) of the next item that weights of this version may score."""
        for run in self._runs.values():
            if run.waiting and run.version <= version:
                return group_id_of(run.eval_id, run.waiting[-1]), run.version
        return None

    def lease(self, group_id: int, actor_id: str, now: float) -> OpenLease:
        """Give the item that `next_for` named to an actor."""
        run = self._runs[split_id(group_id)[0]]
        item = run.items[run.waiting.pop()]
        item.lease = OpenLease(item.next_attempt, actor_id, (0,), now, now)
        item.grants[item.next_attempt] = actor_id
        item.next_attempt += 1
        return item.lease

    def item(self, group_id: int) -> EvalItem | None:
        eval_id, index = split_id(group_id)
        run = self._runs.get(eval_id)
        return run.items[index] if run is not None and index < len(run.items) else None

    def finish(self, group_id: int, facts: MemberSummary) -> None:
        """The item has its score, whoever held the lease."""
        item = self.item(group_id)
        assert item is not None and item.open
        item.facts, item.lease = facts, None
        waiting = self._runs[split_id(group_id)[0]].waiting
        if split_id(group_id)[1] in waiting:
            waiting.remove(split_id(group_id)[1])

    def release(self, group_id: int, *, failed: bool) -> OpenLease:
        """The lease ended without a score: back to the pool, or given up after `max_attempts` failures."""
        item = self.item(group_id)
        assert item is not None and item.lease is not None
        lease, item.lease = item.lease, None
        item.num_failures += failed
        if item.num_failures >= self._max_attempts:
            item.failed = True
        else:
            eval_id, index = split_id(group_id)
            self._runs[eval_id].waiting.append(index)
        return lease


def group_id_of(eval_id: int, index: int) -> int:
    return EVAL_BIT | eval_id << 32 | index


def split_id(group_id: int) -> tuple[int, int]:
    """(eval_id, index) of an evaluation group's number."""
    return (group_id & ~EVAL_BIT) >> 32, group_id & 0xFFFFFFFF
