"""Any dataset of the reasoning_gym package as a task: its questions, its options, its own scorer.

Every question is drawn when it is asked for; no list of them is ever built. A question belongs to the test split if its
own hash says so and is drawn again otherwise, so the splits are disjoint even where the dataset has few questions.
The package takes seconds to import, so only constructing a task (or asking for the names) imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from envs.task_file import describe, refuse_unknown
from streamrl.environment import Record, SingleTurnTask, Step
from streamrl.errors import TaskError
from streamrl.extension import did_you_mean

PREFIX = "reasoning_gym."
TEST_SHARE = 5
"""One question in this many belongs to the test split."""
NUM_DRAWS = 200
"""Draws before a split counts as empty: a fair dataset misses the test split this often with chance 1e-19."""
STRIDE = 1_000_003
"""Between the draws of one index: larger than a split, so no two indices share a draw. 200 draws stay below 2**31."""
OWN_OPTIONS = ("answer_format", "format_reward", "instruction", "num_test", "num_train", "seed")

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_number(completion: str) -> str | None:
    """The last number of the text without thousands separators, or None."""
    found = _NUMBER.findall(completion)
    return found[-1].replace(",", "") if found else None


def tagged(completion: str) -> str | None:
    """What stands inside the last <answer>...</answer>, or None."""
    found = _TAG.findall(completion)
    return found[-1].strip() if found else None


def first_line(completion: str) -> str | None:
    """The first line that is not empty, or None."""
    return next((line.strip() for line in completion.splitlines() if line.strip()), None)


def whole_text(completion: str) -> str | None:
    """Everything, without white space around it, or None if nothing is left."""
    return completion.strip() or None


ANSWER_FORMATS: dict[str, tuple[Callable[[str], str | None], str]] = {
    "number": (last_number, "Reply with the number only."),
    "tag": (tagged, "Put the final answer between <answer> and </answer>."),
    "line": (first_line, "Reply with the answer only, on one line."),
    "text": (whole_text, "Reply with the answer only."),
}
"""How an answer is read from a completion, and the instruction that asks for it."""


def dataset_names() -> list[str]:
    """The datasets of the installed package; none if it is not installed."""
    try:
        return sorted(_package().DATASETS)
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

    The score is the dataset's own, in [0, 1]; the reward is score + format part; both parts are named.
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
        self._dataset = _make_dataset(dataset, options, seed)
        self._entry = lru_cache(maxsize=256)(self._dataset.__getitem__)

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
        # A scorer may need metadata that JSON cannot carry, so the entry is drawn again instead of being sent along.
        entry = self._entry(record["draw"])
        if entry["question"] != record["question"]:
            raise TaskError(f"{self.name} is not a pure function of its seed: question {record['draw']} changed.")
        answer = self._extract(completion)
        score = 0.0 if answer is None else float(self._dataset.score_answer(answer, entry))
        form = 0.0 if answer is None else self.format_reward
        return Step(reward=score + form, score=score, parts={"correct": score, "format": form})

    def target(self, record: Record) -> str:
        """The shortest right completion; for the tag format, the answer in its tag."""
        return f"<answer>{record['answer']}</answer>" if self._extract is tagged else str(record["answer"])


def _is_test(question: str) -> bool:
    return int.from_bytes(blake2b(question.encode(), digest_size=4).digest(), "big") % TEST_SHARE == 0


def _package() -> Any:
    try:
        import reasoning_gym  # noqa: F401  (registers the datasets)
        from reasoning_gym import factory
    except ModuleNotFoundError as error:
        raise TaskError(f"the reasoning tasks need {error.name}: pip install 'streamrl[tasks]'.") from error
    return factory


def config_class(dataset: str) -> Any:
    """The dataclass of a data set's options. Raises TaskError: no such data set, or the package is missing."""
    return _classes(dataset)[1]


def _classes(name: str) -> tuple[Any, Any]:
    datasets = _package().DATASETS
    if name not in datasets:
        hint = did_you_mean(name, datasets)
        raise TaskError(f"reasoning_gym has no dataset {name!r}.{hint} It has {len(datasets)}: {', '.join(datasets)}.")
    return datasets[name]


def _make_dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    dataset_class, configuration = _classes(name)
    known = [f.name for f in fields(configuration) if f.name not in ("seed", "size")]
    refuse_unknown(options, [*known, *OWN_OPTIONS], PREFIX + name)
    try:
        return dataset_class(configuration(**options, seed=seed * 7919))
    except Exception as error:
        raise TaskError(f"{PREFIX}{name} refused the options {options}: {describe(error)}") from error
