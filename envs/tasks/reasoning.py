"""Any dataset of the reasoning_gym package as a task: its questions, its options, its own scorer.

Every question is drawn when it is asked for; no list of them is ever built. A question belongs to the test split if its
own hash says so and is drawn again otherwise, so the splits are disjoint even where the dataset has few questions.
Scorers of the data sets run in a confined process (envs/tasks/reasoning_worker.py): some evaluate what they read.
The package takes seconds to import, so only constructing a task (or asking for the names) imports it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from envs.rewards.extract import last_answer_tag
from envs.rewards.workers import GraderError, WorkerPool
from envs.task_file import refuse_unknown
from envs.thoughts import spoken
from envs.tools.calculator import WRITTEN, evaluate
from envs.tools.tool import ToolError
from streamrl.environment import Record, SingleTurnTask, Step
from streamrl.errors import TaskError, describe, install_extra
from streamrl.extension import did_you_mean

log = logging.getLogger("streamrl.actor")

PREFIX = "reasoning_gym."
SCORE_S = 5.0
"""Longest time of one score; an answer that takes longer earns 0."""
MAX_WORKERS = 4
"""Processes of an actor that score; one is enough unless answers keep them busy."""
WRONG = 0.05
"""reasoning_gym's score of an expression that does not solve countdown's question."""
_ARITHMETIC = re.compile(rf"[\d\s()+\-*/{''.join(WRITTEN)}]+")


def score_countdown(answer: str, entry: Mapping[str, Any]) -> float:
    """Countdown, where all given numbers, each once, make the target; parsed, never evaluated.

    1 for a solution, WRONG for another expression of numbers and + - * /, 0 for anything else.
    """
    if not _ARITHMETIC.fullmatch(answer):
        return 0.0
    try:
        value = evaluate(answer)
    except ToolError:
        return 0.0
    numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
    uses_all = sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers)
    return 1.0 if uses_all and value == target else WRONG


OWN_SCORERS: dict[str, Callable[[str, Mapping[str, Any]], float]] = {"countdown": score_countdown}
"""In place of the package's scorer."""
TEST_SHARE = 5
"""One question in this many belongs to the test split."""
NUM_DRAWS = 200
"""Draws before a split counts as empty: a fair dataset misses the test split this often with chance 1e-19."""
STRIDE = 1_000_003
"""Between the draws of one index: larger than a split, so no two indices share a draw. 200 draws stay below 2**31."""
OWN_OPTIONS = ("answer_format", "format_reward", "instruction", "num_test", "num_train", "seed")

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def last_number(completion: str) -> str | None:
    """The last number of the text without thousands separators, or None."""
    found = _NUMBER.findall(completion)
    return found[-1].replace(",", "") if found else None


def first_line(completion: str) -> str | None:
    """The first line that is not empty, or None."""
    return next((line.strip() for line in completion.splitlines() if line.strip()), None)


def whole_text(completion: str) -> str | None:
    """Everything, without white space around it, or None if nothing is left."""
    return completion.strip() or None


ANSWER_FORMATS: dict[str, tuple[Callable[[str], str | None], str]] = {
    "number": (last_number, "Reply with the number only."),
    "tag": (last_answer_tag, "Put the final answer between <answer> and </answer>."),
    "line": (first_line, "Reply with the answer only, on one line."),
    "text": (whole_text, "Reply with the answer only."),
}
"""How an answer is read from a completion, and the instruction that asks for it."""


def dataset_names() -> list[str]:
    """The datasets of the installed package; none if it is not installed."""
    try:
        return sorted(package().DATASETS)
    except TaskError:
        return []


class ReasoningTask(SingleTurnTask):
    """One reasoning_gym dataset.

    Args:
        dataset: its name in the package, such as chain_sum.
        answer_format: how the answer is read: number (the last one), tag, line (the first one) or text (everything).
        instruction: put after each question; None for that format's own, "" for none.
        format_reward: added to the reward if an answer was found at all.
        num_train, num_test: records per split.
        seed: another seed is another stream of records over the same two disjoint sets.
        options: fields of the dataset's own configuration, such as max_terms=2.

    The score is the dataset's own, in [0, 1]; the reward is score + format part; both are parts, the second if it is
    paid at all. An answer that the scorer cannot read, or takes too long over, scores 0; the part `unscored` counts
    them.
    """

    def __init__(
        self, dataset: str, *, answer_format: str = "number", instruction: str | None = None,
        format_reward: float = 0.0, num_train: int = 1_000_000, num_test: int = 200, seed: int = 0, **options: Any,
    ) -> None:
        if answer_format not in ANSWER_FORMATS:
            raise TaskError(f"answer_format={answer_format!r} is unknown: choose one of {', '.join(ANSWER_FORMATS)}.")
        if not 0 < num_train <= STRIDE or not 0 < num_test <= STRIDE:
            raise TaskError(f"num_train and num_test must lie in 1..{STRIDE}, got {num_train} and {num_test}.")
        extract, standard_instruction = ANSWER_FORMATS[answer_format]
        self.name = PREFIX + dataset
        self.num_train, self.num_test = num_train, num_test
        self.format_reward = format_reward
        self.instruction = standard_instruction if instruction is None else instruction
        self._extract = extract
        self._dataset = make_dataset(dataset, options, seed)
        self._entry = lru_cache(maxsize=256)(self._dataset.__getitem__)
        self._question = dataset, options, seed
        self._own_scorer = OWN_SCORERS.get(dataset)
        compares_texts = type(self._dataset).score_answer is package().ProceduralDataset.score_answer
        self.may_block = self._own_scorer is None and not compares_texts
        self._pool = WorkerPool("envs.tasks.reasoning_worker", min(MAX_WORKERS, os.cpu_count() or 1), SCORE_S)
        self._warned = False
        if self.may_block:  # an actor starts the first worker before its first episode: that takes seconds
            self.set_up, self.tear_down = self._pool.start, self._pool.close

    def record(self, split: str, index: int) -> Record:
        for attempt in range(NUM_DRAWS):
            draw = index + attempt * STRIDE
            entry = self._entry(draw)
            if _is_test(entry["question"]) == (split != "train"):
                prompt = f"{entry['question']}\n{self.instruction}" if self.instruction else entry["question"]
                return {"prompt": prompt, "question": entry["question"], "answer": str(entry["answer"]), "draw": draw}
        raise TaskError(
            f"{self.name}: {NUM_DRAWS} draws gave no question of the {split} split; with these options the dataset has "
            "too few different questions: widen its ranges."
        )

    def reward(self, record: Record, completion: str) -> Step:
        answer = self._extract(spoken(completion))
        form = 0.0 if answer is None else self.format_reward
        score, unscored = 0.0, False
        if answer is not None:
            try:
                score = self._score(record, answer)
            except GraderError as error:
                unscored = True
                self._warn(error)
        parts = {"correct": score} | ({"format": form} if self.format_reward else {})
        parts |= {"unscored": float(unscored)} if self.may_block else {}
        return Step(reward=score + form, score=score, parts=parts)

    def _score(self, record: Record, answer: str) -> float:
        # A scorer may need metadata that JSON cannot carry, so the entry is drawn again instead of being sent along.
        if self.may_block:
            return float(self._pool.ask([*self._question, record["draw"], record["question"], answer]))
        entry = entry_of(self._entry, record["draw"], record["question"], self.name)
        try:
            return score_of(self._own_scorer or self._dataset.score_answer, answer, entry)
        except Exception as error:
            raise GraderError(f"{type(error).__name__}: {error}"[:200]) from error

    def _warn(self, error: GraderError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s could not score an answer, which earns 0 as all such answers do: %s", self.name, error)

    def target(self, record: Record) -> str:
        """The shortest right completion; for the tag format, the answer in its tag."""
        return f"<answer>{record['answer']}</answer>" if self._extract is last_answer_tag else str(record["answer"])


def _is_test(question: str) -> bool:
    return int.from_bytes(blake2b(question.encode(), digest_size=4).digest(), "big") % TEST_SHARE == 0


def entry_of(entries: Callable[[int], Any], draw: int, question: str, name: str) -> Any:
    """The entry of a draw. Raises TaskError if it has another question now."""
    entry = entries(draw)
    if entry["question"] != question:
        raise TaskError(f"{name} is not a pure function of its seed: question {draw} changed.")
    return entry


def score_of(scorer: Callable[[str, Any], Any], answer: str, entry: Any) -> float:
    """The scorer's number. Raises ValueError if it is none from 0 to 1, and what the scorer raises."""
    score = float(scorer(answer, entry))
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"the score is {score}")
    return score


def package() -> Any:
    """The module of the package that knows its data sets. Raises TaskError if it is not installed."""
    try:
        import reasoning_gym  # noqa: F401  (registers the datasets)
        from reasoning_gym import factory
    except ModuleNotFoundError as error:
        raise TaskError(f"the reasoning tasks need {error.name}; install it with {install_extra('tasks')}.") from error
    return factory


def config_class(dataset: str) -> Any:
    """The dataclass of a data set's options. Raises TaskError: no such data set, or the package is missing."""
    return _classes(dataset)[1]


def _classes(name: str) -> tuple[Any, Any]:
    datasets = package().DATASETS
    if name not in datasets:
        hint = did_you_mean(name, datasets)
        raise TaskError(f"reasoning_gym has no dataset {name!r}.{hint} It has {len(datasets)}: {', '.join(datasets)}.")
    return datasets[name]


def make_dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    """A data set of the package. Raises TaskError: no such one, or an option that it refuses."""
    dataset_class, configuration = _classes(name)
    known = [f.name for f in fields(configuration) if f.name not in ("seed", "size")]
    refuse_unknown(options, [*known, *OWN_OPTIONS], PREFIX + name)
    try:
        return dataset_class(configuration(**options, seed=seed * 7919))
    except Exception as error:
        raise TaskError(f"{PREFIX}{name} refused the options {options}: {describe(error)}") from error
