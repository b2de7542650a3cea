"""Evaluation groups: one member each, outside capacity and age, never trained on, forgotten with the learner.

A group's number holds `EVAL_BIT`, the evaluation's id and the place of its answer, so a checkpoint need not store it.

With a pin every answer is made by one version: that of the actor which gets the first lease. Only actors that have it
get leases, and they keep it until these are done. If no actor has it any more, as when the last one died, the
evaluation starts again with another version; if a newer version has waited for `keep_s`, it ends with the answers that
are there. All sets that ask for the same version share one pin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import nan

from learner.hub.ledger.tables.groups import Delivery, Grant, GroupRecord, GroupState, OpenLease
from streamrl.messages import EVAL_BIT, EvalResult, KeptGroup, Sampling
from streamrl.messages.validate import MemberSummary

MAX_ANSWERS = 1 << 24  # of one evaluation; a group's number has 32 bits for the place of an answer
MAX_FINISHED = 64  # ended evaluations whose result can still be asked for


@dataclass(frozen=True, slots=True)
class EvalSource:
    """A set of evaluation prompts: the record at an index as JSON, None for a bad one, and how answers are drawn."""

    record: Callable[[int], bytes | None]
    sampling: Sampling


@dataclass(slots=True)
class Pin:
    """The version that answers the evaluations of one request; None until the first lease."""

    version: int | None = None
    overdue_at: float | None = None  # set when a newer version is first seen to wait for them


@dataclass(slots=True)
class EvalRun:
    eval_id: int
    version: int  # that was asked for
    records: list[GroupRecord]  # HELD with their score, DROPPED after too many failures
    waiting: list[GroupRecord]  # to lease, last one first
    keep: frozenset[int] = frozenset()  # prompts whose transcripts go into the result
    num_responses: int = 1
    dataset: str = ""
    pin: Pin | None = None
    answers: dict[int, str] = field(default_factory=dict)  # group id -> final answer
    turns: dict[int, int] = field(default_factory=dict)  # group id -> their number
    num_unanswered: int = 0

    @property
    def done(self) -> bool:
        return all(record.state in (GroupState.HELD, GroupState.DROPPED) for record in self.records)

    @property
    def pinned_to(self) -> int | None:
        """The version that alone may answer; None without a pin, and before the first lease."""
        return self.pin.version if self.pin is not None else None

    def may_ask(self, version: int) -> bool:
        """Return whether an actor with this version may answer what waits."""
        if self.pinned_to is not None:
            return version == self.pinned_to
        return version >= self.version

    def counts(self, summary: MemberSummary) -> bool:
        """Return whether an answer is of the pinned version from its first to its last token."""
        return self.pin is None or all(span.version == self.pin.version for span in summary.spans)

    def progress(self) -> str:
        """Describe how far it is, for a person."""
        num = sum(record.state in (GroupState.HELD, GroupState.DROPPED) for record in self.records)
        name = f" on {self.dataset}" if self.dataset else ""
        return f"evaluation of version {self.version}{name}: {num} of {len(self.records)} prompts are scored"

    def result(self) -> EvalResult:
        """Means over all answers, NaN without any; of a named score over those that have it."""
        answered = [
            [record for record in self.records[start : start + self.num_responses] if record.members]
            for start in range(0, len(self.records), self.num_responses)
        ]
        scored = [record.members[0] for record in self.records if record.members]
        names = sorted({name for one in scored for name in one.scores})
        versions = [span.version for one in scored for span in one.spans]
        return EvalResult(
            self.eval_id, self.version if self.pinned_to is None else self.pinned_to,
            num_prompts=sum(map(bool, answered)),
            score=_mean([_score(one) for one in scored]), reward=_mean([one.reward for one in scored]),
            mean_tokens=_mean([one.num_action_tokens for one in scored]),
            truncated_fraction=_mean([one.cut for one in scored]),
            scores={name: _mean([one.scores[name] for one in scored if name in one.scores]) for name in names},
            prompt_scores=tuple(tuple(_score(one.members[0]) for one in some) for some in answered),
            kept=tuple(
                KeptGroup(frame, origin) for record in self.records
                for frame, origin in zip(record.frames, record.origins, strict=True)
            ),
            dataset=self.dataset, num_unanswered=self.num_unanswered,
            prompt_answers=tuple(tuple(self.answers.get(one.group_id, "") for one in some) for some in answered),
            versions=(min(versions), max(versions)) if versions else None,
            mean_turns=_mean([self.turns.get(record.group_id, 1) for record in self.records if record.members]),
        )


def _score(summary: MemberSummary) -> float:
    return summary.scores.get("score", summary.reward)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan


class EvalTable:
    """Open evaluations, oldest first, and the last few that ended.

    Args:
        keep_s: longest time for which an evaluation may delay the install of a newer version; 0 pins no version.
    """

    def __init__(self, max_attempts: int, keep_s: float = 0.0) -> None:
        self._max_attempts, self.keep_s = max_attempts, keep_s
        self._runs: OrderedDict[int, EvalRun] = OrderedDict()

    def request(
        self, eval_id: int, version: int, num_prompts: int, keep: Collection[int] = (), num_responses: int = 1,
        dataset: str = "",
    ) -> None:
        """Score prompts 0 .. num_prompts - 1 of a set with at least this version, `num_responses` times each.

        Of the prompts in `keep` the first answer is kept with its tokens.

        Raises ValueError: the id was used before, or there is nothing, or far too much, to answer.
        """
        if eval_id in self._runs:
            raise ValueError(f"evaluation {eval_id} was already asked for: use a new id")
        if not 1 <= num_prompts * num_responses <= MAX_ANSWERS:
            raise ValueError(
                f"evaluation {eval_id} has num_prompts={num_prompts}, num_responses={num_responses}: ask for 1 to "
                f"{MAX_ANSWERS} answers"
            )
        records = [
            GroupRecord(EVAL_BIT | eval_id << 32 | place, place // num_responses, place % num_responses)
            for place in range(num_prompts * num_responses)
        ]
        shared = next((run.pin for run in self._runs.values() if run.version == version and not run.done), None)
        self._runs[eval_id] = EvalRun(
            eval_id, version, records, records[::-1], frozenset(keep), num_responses, dataset,
            (shared or Pin()) if self.keep_s else None,
        )
        finished = [key for key, run in self._runs.items() if run.done]
        for key in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self._runs[key]

    def get(self, eval_id: int) -> EvalRun | None:
        return self._runs.get(eval_id)

    def next_for(self, version: int) -> EvalRun | None:
        """The oldest evaluation with something to lease that weights of this version may score."""
        return next((run for run in self._runs.values() if run.waiting and run.may_ask(version)), None)

    def any_waiting(self) -> bool:
        """Return whether there is something to lease, whichever version may score it."""
        return any(run.waiting for run in self._runs.values())

    def lease(self, run: EvalRun, actor_id: str, version: int, now: float) -> tuple[GroupRecord, OpenLease]:
        """Lease the next prompt to an actor with this version; the first lease pins the evaluation to it."""
        if run.pin is not None and run.pin.version is None:
            run.pin.version = version
        record = run.waiting.pop()
        record.grants[record.next_attempt] = Grant(actor_id, (0,))
        record.lease = lease = OpenLease(record.next_attempt, actor_id, (0,), now, now)
        record.next_attempt += 1
        return record, lease

    def num_waiting_with(self, run: EvalRun) -> int:
        """Count prompts that wait for the same version as this evaluation."""
        return sum(len(one.waiting) for one in self._runs.values() if one is run or one.pin is run.pin is not None)

    def record(self, group_id: int) -> GroupRecord | None:
        run, index = self._runs.get((group_id & ~EVAL_BIT) >> 32), group_id & 0xFFFFFFFF
        return run.records[index] if run is not None and index < len(run.records) else None

    def finish(
        self, record: GroupRecord, summary: MemberSummary, frame: bytes, delivery: Delivery, answer: str = "",
        num_turns: int = 1,
    ) -> None:
        """Note the score of a prompt, whichever actor held the lease."""
        record.members[0], record.lease, record.state = summary, None, GroupState.HELD
        run = self.run_of(record)
        run.answers[record.group_id], run.turns[record.group_id] = answer, num_turns
        if record.prompt_index in run.keep and record.pass_index == 0:
            record.frames, record.deliveries = [bytes(frame)], [delivery]
        if record in run.waiting:
            run.waiting.remove(record)

    def release(self, record: GroupRecord, *, failed: bool) -> None:
        """End a lease without a score: its prompt returns to the pool, or is given up after `max_attempts` failures."""
        record.lease = None
        record.num_failures += failed
        if record.num_failures >= self._max_attempts:
            record.state = GroupState.DROPPED
        elif record.state is GroupState.READY:
            self.run_of(record).waiting.append(record)

    def run_of(self, record: GroupRecord) -> EvalRun:
        return self._runs[(record.group_id & ~EVAL_BIT) >> 32]

    # --- pins -------------------------------------------------------------------------------------------------------

    def _pinned(self) -> Iterator[EvalRun]:
        return (run for run in self._runs.values() if run.pinned_to is not None and not run.done)

    def lost(self, installed: Collection[int]) -> list[EvalRun]:
        """List evaluations whose version none of these actors has any more; `start_again` follows."""
        return [run for run in self._pinned() if run.pinned_to not in installed]

    def start_again(self, run: EvalRun) -> None:
        """Forget the answers, and take the version of the next actor. No lease of it may be open."""
        for record in run.records:
            if record.state is not GroupState.DROPPED:
                record.state = GroupState.READY
                record.members, record.frames, record.deliveries = {}, [], []
        run.answers.clear()
        run.waiting = [record for record in reversed(run.records) if record.state is GroupState.READY]
        assert run.pin is not None
        run.pin.version = run.pin.overdue_at = None

    def overdue(self, newest: int, now: float) -> list[EvalRun]:
        """List evaluations that have kept actors from the newest version for `keep_s`; `give_up` follows."""
        found = []
        for run in self._pinned():
            assert run.pin is not None and run.pin.version is not None
            if newest > run.pin.version and run.pin.overdue_at is None:
                run.pin.overdue_at = now + self.keep_s
            if run.pin.overdue_at is not None and now >= run.pin.overdue_at:
                found.append(run)
        return found

    def give_up(self, run: EvalRun) -> None:
        """End it with the answers that are there. No lease of it may be open."""
        for record in run.records:
            if record.state is GroupState.READY:
                record.state = GroupState.DROPPED
                run.num_unanswered += 1
        run.waiting.clear()
