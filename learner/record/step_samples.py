"""Trajectories that the run keeps to be read: chosen before a step, written after it by a thread on rank 0.

The draw is fair. Every group that arrived since the step before has a key, a hash of the run's seed and its number. The
groups with the smallest keys are taken, and of each one member by another hash. Rewards, lengths and ages have no
influence, so groups that a filter dropped or that were too old to train show as often as they occur.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import AutoTokenizer

from envs.expected import known_answer
from envs.family_forms import family_of
from envs.registry import task_of
from envs.rewards.extract import final_answer
from learner.data.trajectories import Trajectory, read_groups
from learner.objective.statistics import StepStatistics
from learner.ranks.mesh import Ranks
from streamrl.config.eval_sets import EvalSet
from streamrl.config.schema import SamplesConfig
from streamrl.environment import Task
from streamrl.messages import EVAL_BIT, BatchShare, EvalResult, KeptGroup
from streamrl.messages.printable import printable
from streamrl.messages.seeding import draw_key, mix64
from streamrl.metrics.samples import TRAINED, Sample, SampleFile, SampleTokens, Turn

_MEMBERS, _EVALS = 0x5A3E, 0x5A3F  # streams of their own: the seed also decides what is sampled


def draw_groups(group_ids: Iterable[int], num: int, seed: int) -> list[int]:
    """The `num` groups of a fair draw without replacement; what was drawn elsewhere by the same rule can be merged."""
    return heapq.nsmallest(num, set(group_ids), key=lambda group_id: draw_key(seed, group_id))


def draw_member(members: Sequence[int], group_id: int, seed: int) -> int:
    """Draw one of these members of a group."""
    return members[mix64(seed, group_id, _MEMBERS) % len(members)]


def draw_prompts(num_prompts: int, num: int, seed: int) -> tuple[int, ...]:
    """Prompts of an evaluation whose answers are kept: the same in every one, so that versions can be compared."""
    return tuple(sorted(heapq.nsmallest(num, range(num_prompts), key=lambda index: mix64(seed, index, _EVALS))))


class Draft(msgspec.Struct, array_like=True):
    """A sample whose texts are still ids; T tokens after the prompt. What one rank sends to rank 0."""

    sample: Sample
    prompt_ids: list[int]
    token_ids: list[int]  # [T]
    runs: list[tuple[int, int, bool, float]]  # start, end, whether the model said it, its reward; together 0 .. T
    versions: list[int]  # [T], -1 off the mask
    ratios: list[float | None]  # [T], or empty
    later: list[tuple[int, list[int]]]  # of each sequence after the first: where it starts, its prompt

    def decoded(self, tokenizer: object, num_detailed_tokens: int) -> Sample:
        """The sample with its texts; `tokenizer` is one of transformers."""

        def decode(ids: Sequence[int], *, special: bool = False) -> str:
            return tokenizer.decode(  # type: ignore[attr-defined]
                ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )

        prompts, said_by = dict(self.later), {True: family_of(tokenizer, decode).text, False: decode}
        turns = []
        for start, end, said, reward in self.runs:
            if start in prompts:
                turns.append(Turn("context", decode(prompts[start], special=True)))
            text = said_by[said](self.token_ids[start:end])
            turns.append(Turn("assistant" if said else "environment", text, reward))
        said = [turn.content for turn in turns if turn.role == "assistant"]
        tokens = None
        if num_detailed_tokens:
            ids = self.token_ids[:num_detailed_tokens]
            tokens = SampleTokens(
                ids, token_texts(lambda part: decode(part, special=True), ids),
                (self.ratios or [None] * len(ids))[: len(ids)], self.versions[: len(ids)],
                [start for start, _ in self.later if start < len(ids)],
            )
        return msgspec.structs.replace(
            self.sample, prompt=decode(self.prompt_ids, special=True), answer="\n".join(said),
            messages=turns if len(turns) > 1 else [], tokens=tokens,
        )


def draft(
    row: Trajectory, *, kind: str, step: int, version: int, fate: str, ratios: Sequence[float] = (),
    advantage: float | None = None, dataset: str = "",
) -> Draft:
    """A trajectory as it is kept.

    Args:
        version: the version that lags are counted from.
        ratios: pi/mu of its action tokens, in order; empty if it was not trained on.
    """
    mask, ids = row.mask, row.token_ids
    sampled_by = row.versions[mask]
    oldest = int(sampled_by.min()) if len(sampled_by) else version
    per_token: list[float | None] = []
    if len(ratios):
        per_token = [None] * len(ids)
        for place, ratio in zip(np.flatnonzero(mask).tolist(), ratios, strict=True):
            per_token[place] = float(f"{ratio:.4g}")
    sample = Sample(
        kind=kind, step=step, version=int(sampled_by[0]) if len(sampled_by) else version,
        lag=0 if kind == "eval" else max(0, version - oldest), prompt="", answer="", reward=row.reward,
        score=float(row.scores.get("score", row.reward)), num_tokens=row.num_action_tokens,
        group=row.group_id & ~EVAL_BIT, member=row.index, record=row.prompt_index, fate=fate, actor=row.actor_id,
        truncated=row.truncated, advantage=advantage, dataset=dataset,
        parts={name: float(part) for name, part in row.scores.items() if name != "score"},
    )
    later = [(start, prompt.tolist()) for start, prompt in row.later]
    return Draft(sample, row.prompt_ids.tolist(), ids.tolist(), _runs(row), row.versions.tolist(), per_token, later)


def _runs(row: Trajectory) -> list[tuple[int, int, bool, float]]:
    """Turns and what stands between them: where the mask, the turn or the sequence changes."""
    if not len(row.mask):
        return []
    kinds = np.where(row.mask, row.turns, -1)
    changes = np.append(True, kinds[1:] != kinds[:-1])
    changes[[start for start, _ in row.later]] = True
    starts = np.flatnonzero(changes).tolist()
    return [
        (start, end, bool(row.mask[start]), float(row.rewards[start:end].sum()))
        for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True)
    ]


def token_texts(decode: object, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined they are the whole text. `decode` makes a text of a list of ids.

    A character of several tokens is the text of the last one, the others are empty.
    """
    texts: list[str] = []
    context = done = 0  # a token is decoded with the one before it: many tokenizers drop a space at the beginning
    for end in range(1, len(ids) + 1):
        text = decode(ids[context:end])  # type: ignore[operator]
        if text.endswith("\ufffd") and end < len(ids) and end - done < 4:  # no character has more than 4 bytes
            texts.append("")
            continue
        before = decode(ids[context:done]) if done > context else ""  # type: ignore[operator]
        texts.append(text[len(before) :])
        context, done = done, end
    return texts


log = logging.getLogger("streamrl.learner")

MAX_WAITING = 64
"""Steps whose samples may wait for the writer; a learner that is faster than it loses some."""

MAX_ECHOED = 240
"""Characters of a prompt, and of an answer, that are printed."""

_DRAFTS = msgspec.msgpack.Decoder(list[Draft])


class SampleWriter:
    """Decodes and writes in a thread of its own, which a training step never waits for."""

    def __init__(
        self, file: SampleFile, model_dir: Path, *, settings: SamplesConfig, expected: Callable[[Sample], str]
    ) -> None:
        self._file, self._model_dir, self._num_detailed_tokens = file, model_dir, settings.num_detailed_tokens
        self._echo_every, self._echoed = settings.echo_every_steps, 0
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
                self._echo(sample)

    def _echo(self, one: Sample) -> None:
        """Print one that was trained on, if it is the turn of its step."""
        due = self._echo_every and (one.step - 1) % self._echo_every == 0 and one.step != self._echoed
        if due and one.kind == "train" and one.fate == TRAINED:
            self._echoed = one.step
            prompt = one.prompt if len(one.prompt) <= MAX_ECHOED else f"...{one.prompt[-MAX_ECHOED:]}"
            answer = one.answer if len(one.answer) <= MAX_ECHOED else f"{one.answer[:MAX_ECHOED]}..."
            told = printable(prompt), printable(answer)  # both are a model's or a user's words
            log.info("step %d, an answer with reward %.3g: %s -> %s", one.step, one.reward, *told)


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
    steps_per_batch: int = 1, expected: Callable[[Sample], str] = lambda _: "", evals_dir: str | None = None,
) -> StepSamples:
    """Samples of this rank; rank 0 opens the file, and asks `expected` for the right answer of each."""
    writer = None
    if ranks.rank == 0 and (settings.num_per_step or settings.num_per_eval):
        if evals_dir is not None:
            Path(evals_dir).mkdir(parents=True, exist_ok=True)
        file = SampleFile(
            run_dir, max_bytes=settings.max_bytes, resume_step=resume_step,
            evals_dir=Path(evals_dir) if evals_dir is not None else None,
        )
        writer = SampleWriter(file, model_dir, settings=settings, expected=expected)
    return StepSamples(settings, seed=seed, ranks=ranks, writer=writer, steps_per_batch=steps_per_batch)


MAX_CHARS = 500


class ExpectedAnswers:
    """Right answers by record: of a run's own task, and of its evaluation sets."""

    def __init__(self, task: Task, sets: Sequence[EvalSet]) -> None:
        self._tasks: dict[str, Task] = {"": task}
        self._sets = {one.name: one for one in sets if one.name}

    def __call__(self, sample: Sample) -> str:
        """The record's own answer, without its derivation and cut to 500 characters; "" if it has none."""
        try:
            split = "test" if sample.kind == "eval" else "train"
            answer = known_answer(self._task(sample.dataset), split, sample.record)
        except Exception:  # code of users: a sample without it is worth more than none
            log.debug("no expected answer for record %d", sample.record, exc_info=True)
            return ""
        return "" if answer is None else final_answer(str(answer))[:MAX_CHARS]

    def _task(self, dataset: str) -> Task:
        if dataset not in self._tasks:
            one = self._sets[dataset]
            task = task_of(one.config) if one.other_task else self._tasks[""]
            self._tasks[dataset] = task
        return self._tasks[dataset]
