"""Trajectories that the run keeps to be read: chosen before a step, written after it by a thread on rank 0."""

from __future__ import annotations

import heapq
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from learner.data.trajectories import Trajectory, read_groups
from learner.objective.statistics import StepStatistics
from learner.ranks.mesh import Ranks
from learner.record.sample_selection import Draft, draft, draw_groups, draw_member, draw_prompts
from streamrl.config.schema import SamplesConfig
from streamrl.messages import BatchShare, EvalResult, KeptGroup
from streamrl.messages.seeding import draw_key
from streamrl.metrics.samples import TRAINED, Sample, SampleFile

log = logging.getLogger("streamrl.learner")

MAX_WAITING = 64
"""Steps whose samples may wait for the writer; a learner that is faster than it loses some."""

_DRAFTS = msgspec.msgpack.Decoder(list[Draft])


class SampleWriter:
    """Decodes and writes in a thread of its own, which a training step never waits for."""

    def __init__(
        self, file: SampleFile, model_dir: Path, *, num_detailed_tokens: int, expected: Callable[[Sample], str]
    ) -> None:
        self._file, self._model_dir, self._num_detailed_tokens = file, model_dir, num_detailed_tokens
        self._expected = expected
        self._waiting: queue.Queue[list[Draft] | None] = queue.Queue(MAX_WAITING)
        self._written: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def put(self, drafts: list[Draft]) -> None:
        """Write these soon."""
        try:
            self._waiting.put_nowait(drafts)
        except queue.Full:
            self._num_lost += len(drafts)

    def take(self) -> list[Sample]:
        """Samples written since the last call."""
        return [self._written.get() for _ in range(self._written.qsize())]

    def close(self) -> None:
        """Write what waits."""
        if not self._thread.is_alive():
            return
        self._waiting.put(None)
        self._thread.join()
        if self._num_lost:
            log.warning("%d samples were left out: the learner was faster than their writer", self._num_lost)

    def _run(self) -> None:
        tokenizer: Any = None
        failed = False
        while (drafts := self._waiting.get()) is not None:
            try:
                tokenizer = tokenizer or AutoTokenizer.from_pretrained(
                    self._model_dir, local_files_only=True, trust_remote_code=False
                )
                samples = [one.decoded(tokenizer, self._num_detailed_tokens) for one in drafts]
                samples = [msgspec.structs.replace(one, expected=self._expected(one)) for one in samples]
                self._file.append(samples)
            except Exception:  # a full disk, or a tokenizer that cannot decode: never worth a training run
                if not failed:
                    log.warning("samples cannot be written; training goes on without them.", exc_info=True)
                failed = True
                continue
            failed = False
            for sample in samples:
                self._written.put(sample)


class StepSamples:
    """The samples of one rank's steps; rank 0 also has the `writer` and takes those of evaluations."""

    def __init__(
        self, settings: SamplesConfig, *, seed: int, ranks: Ranks, writer: SampleWriter | None = None,
        steps_per_batch: int = 1,
    ) -> None:
        self._steps_per_batch = steps_per_batch  # optimizer steps, which versions count, of one step
        self._settings, self._seed, self._ranks = settings, seed, ranks
        self._writer = writer
        self._chosen: dict[int, Trajectory] = {}
        self._passed_over: tuple[KeptGroup, ...] = ()
        self._version = 0

    def choose(self, rows: Sequence[Trajectory], share: BatchShare, statistics: StepStatistics) -> None:
        """Draw from the whole batch, and have the statistics note what is computed for those of this rank.

        Args:
            rows: of this rank, with the rewards that are trained on, in the order that will be packed.
        """
        self._version, self._chosen = share.version, {}
        self._passed_over = share.passed_over
        if not self._settings.num_per_step:
            return
        drawn = draw_groups((row.group_id for row in share.plan), self._settings.num_per_step, self._seed)
        places = {(row.group_id, row.index): place for place, row in enumerate(rows)}
        for group_id in drawn:
            members = sorted(row.index for row in share.plan if row.group_id == group_id)
            place = places.get((group_id, draw_member(members, group_id, self._seed)))
            if place is not None:
                self._chosen[place] = rows[place]
        statistics.watch(self._chosen)

    def keep(self, step: int, statistics: StepStatistics, *, skipped: bool) -> None:
        """After the step: hand the chosen ones to the writer; a collective call."""
        if not self._settings.num_per_step:
            return
        drafts = []
        for place, row in self._chosen.items():
            ratios, advantages = statistics.watched(place, row.num_action_tokens)
            drafts.append(draft(
                row, kind="train", step=step, version=self._version, fate="skipped" if skipped else TRAINED,
                ratios=ratios, advantage=sum(advantages) / len(advantages) if advantages else None,
            ))
        everyone = self._ranks.gather_bytes(msgspec.msgpack.encode(drafts))
        if self._writer is not None:
            drafts = [one for part in everyone for one in _DRAFTS.decode(part)]
            drafts += self._not_trained(self._passed_over, step, self._version)
            self._writer.put(heapq.nsmallest(
                self._settings.num_per_step, drafts, key=lambda one: draw_key(self._seed, one.sample.group)
            ))

    def dropped(self, groups: Sequence[KeptGroup], version: int) -> None:
        """Keep some of the groups of which no batch came yet, on rank 0; the step is the one that waits."""
        if self._writer is not None:
            self._writer.put(self._not_trained(groups, version // self._steps_per_batch + 1, version))

    def _not_trained(self, passed_over: Sequence[KeptGroup], step: int, version: int) -> list[Draft]:
        """A member of each group that was passed over before this step."""
        members: dict[int, dict[int, tuple[Trajectory, str]]] = {}
        for kept in passed_over:  # a group may have come in parts, of several actors
            for row in _unpacked([kept]):
                members.setdefault(row.group_id, {})[row.index] = row, kept.fate
        chosen = [group[draw_member(sorted(group), group_id, self._seed)] for group_id, group in members.items()]
        return [draft(row, kind="train", step=step, version=version, fate=fate) for row, fate in chosen]

    def eval_prompts(self, num_prompts: int) -> tuple[int, ...]:
        """Prompts of an evaluation whose answers the hub is to send back."""
        return draw_prompts(num_prompts, self._settings.num_per_eval, self._seed)

    def evaluated(self, result: EvalResult) -> None:
        """Keep the transcripts that came with a result."""
        if self._writer is not None and result.kept:
            step = result.version // self._steps_per_batch
            self._writer.put([
                draft(
                    row, kind="eval", step=step, version=result.version, fate="eval", dataset=result.dataset
                )
                for row in _unpacked(result.kept)
            ])

    def take(self) -> list[Sample]:
        """Samples written since the last call, on rank 0."""
        return self._writer.take() if self._writer is not None else []

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.close()


def _unpacked(kept: Sequence[KeptGroup]) -> list[Trajectory]:
    return read_groups([one.frame for one in kept], [one.origin for one in kept])


def open_samples(
    settings: SamplesConfig, run_dir: Path, model_dir: Path, *, seed: int, ranks: Ranks, resume_step: int,
    steps_per_batch: int = 1, expected: Callable[[Sample], str] = lambda _: "",
) -> StepSamples:
    """Samples of this rank; rank 0 opens the file, and asks `expected` for the right answer of each."""
    writer = None
    if ranks.rank == 0 and (settings.num_per_step or settings.num_per_eval):
        file = SampleFile(run_dir, max_bytes=settings.max_bytes, resume_step=resume_step)
        writer = SampleWriter(
            file, model_dir, num_detailed_tokens=settings.num_detailed_tokens, expected=expected
        )
    return StepSamples(settings, seed=seed, ranks=ranks, writer=writer, steps_per_batch=steps_per_batch)
