"""The right answers of samples, beside the model's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from envs.registry import task_of
from envs.rewards.extract import final_answer
from streamrl.config.eval_sets import EvalSet
from streamrl.environment import HasTarget, KnowsAnswer, Task
from streamrl.metrics.samples import Sample

log = logging.getLogger("streamrl.learner")

MAX_CHARS = 500


class ExpectedAnswers:
    """Right answers by record: of a run's own task, and of its evaluation sets."""

    def __init__(self, task: Task, sets: Sequence[EvalSet]) -> None:
        self._tasks: dict[str, Task] = {"": task}
        self._sets = {one.name: one for one in sets if one.name}

    def __call__(self, sample: Sample) -> str:
        """The record's own answer, without its derivation and cut to 500 characters; "" if it has none."""
        try:
            task = self._task(sample.dataset)
            split = "test" if sample.kind == "eval" else "train"
            record = task.record(split, sample.record % task.num_records(split))
            answer = None
            if isinstance(task, KnowsAnswer):
                answer = task.answer(record)
            elif isinstance(task, HasTarget):
                answer = task.target(record)
        except Exception:  # code of users: a sample without it is worth more than none
            log.debug("no expected answer for record %d", sample.record, exc_info=True)
            return ""
        return "" if answer is None else final_answer(str(answer))[:MAX_CHARS]

    def _task(self, dataset: str) -> Task:
        if dataset not in self._tasks:
            one = self._sets[dataset]
            task = task_of(one.config) if one.other_task else self._tasks[""]
            self._tasks[dataset] = task
        return getattr(self._tasks[dataset], "base", self._tasks[dataset])  # of a task with tools around it
