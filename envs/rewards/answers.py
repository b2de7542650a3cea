r"""Rewards that find an answer in a completion and compare it with the record's own.

Each returns a `Step`: its reward needs the right form and the right answer; its score, which evaluations report, is the
answer alone; its parts `format_acc` and `ans_acc` are logged by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from envs.data.shapes import RecordShape, shown
from envs.rewards.extract import (
    ANSWER_TAGS,
    final_answer,
    first_found,
    has_format,
    last_answer_tag,
    last_boxed,
    last_hashes,
    last_number,
)
from envs.rewards.workers import GraderError, WorkerPool, num_workers
from envs.thoughts import spoken, whole
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record, Step
from streamrl.errors import TaskError, install_extra

MAX_ANSWER_CHARS = 300
"""An own answer that is longer, without a box or ####, is taken for a whole solution."""
Grader = Callable[[str, str], bool]
"""Whether the second answer is the same as the first, the record's own."""


def one_text(answer: Any) -> str:
    """A record's own answer as text. Raises TaskError for several, whose meaning a reward by name cannot know."""
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    if answer is None or isinstance(answer, list | tuple | Mapping):
        raise TaskError(
            f"the right answer is {shown(answer)}: give one text or number, name a field inside it, such as "
            "data.answer_key=reward_model.ground_truth.target, or compare it in a reward of your own (env.path)"
        )
    return str(answer)


class MathGrader:
    """math-verify in confined worker processes; a comparison that takes too long, or ends its process, is worth 0.

    Raises:
        TaskError: math-verify is not installed. Without it, equal expressions would silently count as different.
    """

    may_block = True

    def __init__(self, settings: RewardConfig) -> None:
        if find_spec("math_verify") is None:
            raise TaskError(
                f"Rewards that compare mathematics need math-verify; install it with {install_extra('tasks')}."
            )
        self._pool = WorkerPool("envs.rewards.math_worker", num_workers(settings), settings.timeout_s)

    def __call__(self, gold: str, answer: str) -> bool:
        if answer == gold:
            return True
        try:
            return bool(self._pool.ask([gold, answer]))
        except GraderError:
            return False


class _FoundAnswer:
    """Base of rewards that find an answer: `find` says where, `well_formed` whether the form was kept.

    `find` gets what stands after the model's thoughts, `well_formed` all of the completion.

    Args:
        grader: compares answers; None is math-verify.
    """

    def __init__(self, settings: RewardConfig, shape: RecordShape, grader: Grader | None = None) -> None:
        self._settings, self._shape, self._grader = settings, shape, grader or MathGrader(settings)
        self.may_block = bool(getattr(self._grader, "may_block", False))

    def find(self, completion: str) -> str | None:
        raise TypeError(f"{type(self).__name__} must define find(completion)")

    def is_no_answer(self, record: Record) -> bool:
        """Whether the record's own answer is a whole text, which no answer will equal."""
        answer = one_text(self._shape.answer(record) or "").strip()
        return final_answer(answer) == answer and (len(answer) > MAX_ANSWER_CHARS or "\n\n" in answer)

    def well_formed(self, completion: str) -> bool:
        tags = self._settings.format_tags
        return self.find(spoken(completion)) is not None and (not tags or has_format(completion, tags))

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        gold, answer = final_answer(one_text(self._shape.required_answer(record))), self.find(spoken(completion))
        right = float(bool(gold) and answer is not None and self._grader(gold, answer))
        formatted = self.well_formed(whole(completion))
        parts = {"format_acc": float(formatted), "ans_acc": right}
        return Step(reward=self._settings.correct * right * formatted, score=right, parts=parts)


class Boxed(_FoundAnswer):
    r"""The last \boxed{...} is the answer."""

    system_prompt = "Reason step by step, and put your final answer within \\boxed{}."

    def find(self, completion: str) -> str | None:
        return last_boxed(completion)

    def target(self, record: Record, answer: str) -> str:
        return f"\\boxed{{{final_answer(one_text(answer))}}}"


class ThinkAnswerTags(_FoundAnswer):
    """The last <answer>...</answer> is the answer; a completion is a <think> part and an <answer> part, once each."""

    system_prompt = (
        "Think about the question first, inside <think> </think> tags. Then give the final answer alone inside "
        "<answer> </answer> tags, for example <answer> 123 </answer>, and stop."
    )
    stop = ("</answer>",)
    ignore_eos = True  # an answer is over at its tag alone

    def find(self, completion: str) -> str | None:
        return last_answer_tag(completion)

    def well_formed(self, completion: str) -> bool:
        return has_format(completion.rstrip(), self._settings.format_tags or ANSWER_TAGS)

    def target(self, record: Record, answer: str) -> str:
        return f"<think> </think><answer> {final_answer(one_text(answer))} </answer>"


class FreeMath(_FoundAnswer):
    r"""The last \boxed{...}, else the last <answer>, else what follows ####, else the last number; in any form."""

    system_prompt = Boxed.system_prompt

    def find(self, completion: str) -> str | None:
        if "\\boxed{" in completion:  # also one that was never closed: what stands before it is not the answer
            return last_boxed(completion)
        return first_found(completion, last_boxed, last_answer_tag, last_hashes, last_number)

    def well_formed(self, completion: str) -> bool:
        return not self._settings.format_tags or has_format(completion, self._settings.format_tags)

    def target(self, record: Record, answer: str) -> str:
        return f"\\boxed{{{final_answer(one_text(answer))}}}"


class Exact(_FoundAnswer):
    """The answer is everything after the thoughts, compared letter by letter but for white space around it."""

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        super().__init__(settings, shape, lambda gold, answer: gold == answer)

    def is_no_answer(self, record: Record) -> bool:
        return False  # any text may be asked for

    def find(self, completion: str) -> str | None:
        return completion.strip()
