"""`samples.jsonl`: trajectories that a run kept to be read, one JSON object per line.

The learner writes them (`learner.record.samples`); everything that shows them reads them here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.metrics.files import append_lines, read_lines, write_atomic

FILE_NAME = "samples.jsonl"
TRAINED = "trained"
"""The fate of a trajectory that an optimizer step trained on; any other word is the reason why none did."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn after the prompt: what the model said, what the environment answered, or a rewritten history.

    `context` is all that the model read from there on, in place of what came before: the prompt of another sequence.
    """

    role: Literal["assistant", "environment", "context"]
    content: str
    reward: float = 0.0


class SampleTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first tokens after the prompt, actions and observations alike; lists of one length.

    `texts` joined is the decoded text with its special tokens. `ratios` are pi/mu: the probability of the token under
    the policy that was updated, over the probability with which an actor sampled it; None for a token that the model
    did not sample, and in samples that were not trained on. `versions` are those that sampled each token, -1 where
    none did. `starts` are the places from which the model read a rewritten history, in the order of the turns whose
    role is `context`.
    """

    ids: list[int]
    texts: list[str]
    ratios: list[float | None]
    versions: list[int]
    starts: list[int] = []


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory of a run.

    Attributes:
        kind: "train", or "eval" for a transcript of an evaluation.
        step: the optimizer step that trained on it, as in `metrics.jsonl`; of an evaluation the version asked for.
        version: the version that sampled its first token, which is its oldest.
        lag: optimizer steps from that version to the one that was updated; 0 in evaluations.
        prompt: the text that the model was given, with special tokens.
        answer: all that the model said, without special tokens; several turns are joined by newlines.
        expected: the record's own answer, cut to a length; empty if it has none.
        messages: the turns after the prompt, if there is more than one.
        reward: as trained on, with penalties such as those of `overlong`; of an evaluation the task's.
        score: the task's own score.
        parts: named components of the reward.
        num_tokens: tokens that the model sampled.
        truncated: a limit of tokens or turns cut it short.
        fate: "trained", or why it was not: "zero_std", "stale" and so on; "eval" in evaluations.
        advantage: mean over its tokens; None if it was not trained on.
        group, member: which trajectory it is; members of a group share a prompt.
        actor: the actor that generated it.
        record: index of the prompt in its split of the task.
        dataset: name of the evaluation set; empty in training.
        tokens: its first tokens one by one, at most `samples.num_detailed_tokens`.
    """

    kind: Literal["train", "eval"]
    step: int
    version: int
    lag: int
    prompt: str
    answer: str
    reward: float
    score: float
    num_tokens: int
    group: int
    member: int
    record: int
    fate: str = TRAINED
    actor: str = ""
    truncated: bool = False
    advantage: float | None = None
    parts: dict[str, float] = {}
    messages: list[Turn] = []
    dataset: str = ""
    tokens: SampleTokens | None = None
    expected: str = ""


_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(Sample)


def read_samples(run_dir: str | os.PathLike[str], damaged: list[str] | None = None) -> list[Sample]:
    """The samples of a finished, killed or running run in the order in which they were written; [] without the file.

    Damaged lines are left out, named in the log, and added to `damaged`.
    """
    return [sample for _, sample in read_lines(Path(run_dir) / FILE_NAME, _DECODER.decode, damaged)]


class SampleFile:
    """The writer of a run's `samples.jsonl`, which stays near `max_bytes` and covers the whole run.

    When the file is full, every second of its training steps leaves it, and from then on half as many are written:
    steps 1, 3, 5, ..., then 1, 5, 9, .... Where evaluations take more of the file, every second of these leaves it.

    Args:
        resume_step: the step that the checkpoint holds, 0 without one. Samples of what will be done again are dropped;
            None keeps all. Damaged lines are dropped, too.
        evals_dir: a folder that also gets each evaluation, as a file of its own.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, max_bytes: int, resume_step: int | None = None,
        evals_dir: Path | None = None,
    ) -> None:
        self.path, self._max_bytes, self._evals_dir = Path(run_dir) / FILE_NAME, max_bytes, evals_dir
        self._stride = 1
        if self.path.exists():
            kept = self._lines()
            if resume_step is not None:  # without a checkpoint version 0 is evaluated again
                kept = [(line, one) for line, one in kept if one.step <= resume_step and resume_step > 0]
            write_atomic(self.path, b"".join(line for line, _ in kept))

    def append(self, samples: Iterable[Sample]) -> None:
        """Write these, and make room if the file is full; of an evaluation all samples come together."""
        samples = list(samples)
        evals: dict[str, list[bytes]] = {}
        for one in samples if self._evals_dir is not None else ():
            if one.kind == "eval":
                evals.setdefault(f"{one.dataset or 'eval'}_step_{one.step:06d}", []).append(_ENCODER.encode(one))
        for name, lines in evals.items():  # a resumed run writes the file of a step again
            write_atomic(self._evals_dir / f"{name}.jsonl", b"".join(line + b"\n" for line in lines))
        append_lines(self.path, b"".join(_ENCODER.encode(one) + b"\n" for one in samples if self._due(one)))
        while self.path.stat().st_size > self._max_bytes and self._thin():
            pass

    def _lines(self) -> list[tuple[bytes, Sample]]:
        return list(read_lines(self.path, _DECODER.decode))

    def _due(self, sample: Sample) -> bool:
        return sample.kind == "eval" or (sample.step - 1) % self._stride == 0

    def _thin(self) -> bool:
        """Halve what takes most of the file; False if nothing could leave it."""
        lines = self._lines()
        size = {kind: sum(len(line) for line, one in lines if one.kind == kind) for kind in ("train", "eval")}
        if size["train"] >= size["eval"]:
            self._stride *= 2
            kept = [line for line, one in lines if self._due(one)]
        else:
            evaluations = sorted({one.step for _, one in lines if one.kind == "eval"})
            left = {*evaluations[::2], evaluations[-1]}
            kept = [line for line, one in lines if one.kind == "train" or one.step in left]
        if len(kept) == len(lines):
            return False
        write_atomic(self.path, b"".join(kept))
        return True
