"""Tasks under a short name: data sets of reasoning_gym with fitting options, and formats of files with their reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """A data set of reasoning_gym.

    Args:
        dataset: its name there.
        sentence: what it asks.
        options: in place of the defaults of `ReasoningTask` and of the data set.
    """

    dataset: str
    sentence: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """Records of `data.path` that a certain reward scores.

    Args:
        reward: reward.type, unless that is set.
        sentence: what a record holds.
    """

    reward: str
    sentence: str


NAMED: dict[str, NamedDataset] = {
    "sums": NamedDataset("chain_sum", "Sums and differences of two numbers.", {"min_terms": 2, "max_terms": 2}),
    "countdown": NamedDataset(
        "countdown", "Reach a number from given numbers by + - * /; answer in <answer> tags.", {"answer_format": "tag"}
    ),
    "letter_counting": NamedDataset("letter_counting", "How often a letter stands in a text."),
    "sorting": NamedDataset("number_sorting", "Sort numbers; answer on one line.", {"answer_format": "line"}),
}
FORMATS: dict[str, FileFormat] = {
    "gsm8k": FileFormat("math", "Records of question and answer, the answer's last line #### 42."),
    "math": FileFormat("math", "Records of problem and solution, whose answer is \\boxed{42}."),
    "code": FileFormat("code", "Records of prompt and test_cases: inputs and outputs of a program."),
}
