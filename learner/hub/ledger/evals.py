"""Evaluation groups: one member each, outside capacity and age, never trained on, forgotten with the learner.

A group's number holds `EVAL_BIT`, the evaluation's id and the place of its answer, so a checkpoint need not store it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import nan

from learner.hub.ledger.groups import Delivery, GroupRecord, GroupState
from streamrl.messages import EVAL_BIT, EvalResult, KeptGroup, MemberStatus
from streamrl.messages.validate import MemberSummary

MAX_FINISHED = 8  # ended evaluations whose result can still be asked for


@dataclass(slots=True)
class EvalRun:
    eval_id: int
    version: int
    records: list[GroupRecord]  # HELD with their score, DROPPED after too many failures
    waiting: list[GroupRecord]  # to lease, last one first
    keep: frozenset[int] = frozenset()  # prompts whose transcripts go into the result
    num_responses: int = 1

    @property
    def done(self) -> bool:
        return all(record.state in (GroupState.HELD, GroupState.DROPPED) for record in self.records)

    def progress(self) -> str:
        """How far it is, as words for a person."""
        num = sum(record.state in (GroupState.HELD, GroupState.DROPPED) for record in self.records)
        return f"evaluation of version {self.version}: {num} of {len(self.records)} prompts are scored"

    def result(self) -> EvalResult:
        """Means over all answers, NaN without any; of a named score over those that have it."""
        answers = [
            [one for record in self.records[start : start + self.num_responses] for one in record.members.values()]
            for start in range(0, len(self.records), self.num_responses)
        ]
        scored = [record.members[0] for record in self.records if record.members]
        names = sorted({name for one in scored for name in one.scores})
        return EvalResult(
            self.eval_id, self.version, num_prompts=sum(map(bool, answers)),
            score=_mean([one.scores.get("score", one.reward) for one in scored]),
            reward=_mean([one.reward for one in scored]),
            mean_tokens=_mean([one.num_action_tokens for one in scored]),
            truncated_fraction=_mean([one.status == MemberStatus.TRUNCATED for one in scored]),
            scores={name: _mean([one.scores[name] for one in scored if name in one.scores]) for name in names},
            prompt_scores=tuple(
                tuple(one.scores.get("score", one.reward) for one in members) for members in answers
            ),
            kept=tuple(
                KeptGroup(frame, origin) for record in self.records
                for frame, origin in zip(record.frames, record.origins, strict=True)
            ),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan


class EvalTable:
    """Evaluations under way, oldest first, and the last few that ended."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._runs: OrderedDict[int, EvalRun] = OrderedDict()

    def request(
        self, eval_id: int, version: int, num_prompts: int, keep: Collection[int] = (), num_responses: int = 1
    ) -> None:
        """Score evaluation prompts 0 .. num_prompts - 1 with at least this version, `num_responses` times each.

        Of the prompts in `keep` the first answer is kept with its tokens.

        Raises ValueError: the id was used before, or num_prompts is 0.
        """
        if eval_id in self._runs:
            raise ValueError(f"evaluation {eval_id} was already asked for: use a new id")
        if num_prompts < 1:
            raise ValueError(f"evaluation {eval_id} has num_prompts={num_prompts}: ask for at least one")
        records = [
            GroupRecord(EVAL_BIT | eval_id << 32 | place, place // num_responses, place % num_responses)
            for place in range(num_prompts * num_responses)
        ]
        self._runs[eval_id] = EvalRun(eval_id, version, records, records[::-1], frozenset(keep), num_responses)
        finished = [key for key, run in self._runs.items() if run.done]
        for key in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self._runs[key]

    def get(self, eval_id: int) -> EvalRun | None:
        return self._runs.get(eval_id)

    def next_for(self, version: int) -> EvalRun | None:
        """The oldest evaluation with something to lease that weights of this version may score."""
        return next((run for run in self._runs.values() if run.waiting and run.version <= version), None)

    def record(self, group_id: int) -> GroupRecord | None:
        run, index = self._runs.get((group_id & ~EVAL_BIT) >> 32), group_id & 0xFFFFFFFF
        return run.records[index] if run is not None and index < len(run.records) else None

    def finish(self, record: GroupRecord, summary: MemberSummary, frame: bytes, delivery: Delivery) -> None:
        """The prompt has its score, whichever actor held the lease."""
        record.members[0], record.lease, record.state = summary, None, GroupState.HELD
        run = self._run_of(record)
        if record.prompt_index in run.keep and record.pass_index == 0:
            record.frames, record.deliveries = [bytes(frame)], [delivery]
        if record in run.waiting:
            run.waiting.remove(record)

    def release(self, record: GroupRecord, *, failed: bool) -> None:
        """The lease ended without a score: back to the pool, or given up after `max_attempts` failures."""
        record.lease = None
        record.num_failures += failed
        if record.num_failures >= self._max_attempts:
            record.state = GroupState.DROPPED
        else:
            self._run_of(record).waiting.append(record)

    def _run_of(self, record: GroupRecord) -> EvalRun:
        return self._runs[(record.group_id & ~EVAL_BIT) >> 32]
