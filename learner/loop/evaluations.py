"""Evaluations of versions: rank 0 asks for them, actors answer, and training does not wait."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from learner.hub_client.link import HubLink
from learner.ranks.clock import StepClock
from learner.record.recorder import EVALUATIONS, Recorder
from learner.record.step_samples import StepSamples
from streamrl.config.eval_sets import EvalSet
from streamrl.errors import TaskError
from streamrl.metrics.files import read_lines

log = logging.getLogger("streamrl.learner")


class Evaluations:
    """The evaluations of one run; ranks other than 0 have no `recorder`, and ask for none.

    Args:
        sets: where evaluations get their prompts.
        every_steps: batches between two; 0 evaluates at the end only, and at the start (`eval.at_start`).
    """

    def __init__(
        self, sets: Sequence[EvalSet], hub: HubLink, samples: StepSamples, clock: StepClock,
        recorder: Recorder | None, *, every_steps: int,
    ) -> None:
        self._sets, self._hub, self._samples, self._clock = sets, hub, samples, clock
        self._recorder, self._every_steps = recorder, every_steps

    def due(self, step: int) -> bool:
        """Whether this step, which is not the last, ends with one."""
        return self._every_steps > 0 and step % self._every_steps == 0

    def lost(self, run_dir: Path, step: int, *, steps_per_batch: int) -> bool:
        """Tell whether some set has no result of the newest evaluation that was due up to this step.

        The learner that asked for it may have ended; a later version may have answered it.
        """
        if not self._every_steps:
            return False
        due, now = step // self._every_steps * self._every_steps * steps_per_batch, step * steps_per_batch
        rows = [row for _, row in read_lines(run_dir / EVALUATIONS, json.loads) if isinstance(row, dict)]
        ended = [row.get("dataset") for row in rows if row.get("version") in range(due, now + 1)]
        return due > 0 and any(one.name not in ended for one in self._sets)

    def start(self, version: int, *, wait: bool = False) -> None:
        """Score held-out prompts with at least this version."""
        if self._recorder is None or not self._sets:
            return
        for place, one in enumerate(self._sets):
            eval_id, asked = version * len(self._sets) + place, one.config.eval
            kept = self._samples.eval_prompts(asked.num_samples)
            self._hub.evaluate(
                eval_id, version, asked.num_samples, kept, asked.num_responses, one.name, waits=wait,
            )
        if wait:
            num_prompts = sum(one.config.eval.num_samples for one in self._sets)
            log.info("evaluating version %d on %d prompts", version, num_prompts)
            with self._clock.timed("eval"):
                self._hub.wait_for_evals()
        self.take()

    def take(self) -> None:
        """Record what has come. Raises TaskError: no prompt of an evaluation could be scored."""
        if self._recorder is not None:
            settings = {one.name: one.config.eval for one in self._sets}
            for result in self._hub.evals:
                if result.failure:
                    on = f" on {result.dataset}" if result.dataset else ""
                    raise TaskError(f"no prompt of the evaluation of version {result.version}{on} could be scored, "
                                    f"so the run stops: {result.failure}")
                self._recorder.evaluated(result, settings[result.dataset])
                self._samples.evaluated(result)
        self._hub.evals.clear()
