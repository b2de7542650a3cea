"""Short strings to transform: a task that a model of a hundred thousand parameters can learn in a minute on one core.

A record is a pure function of (split, index). Whether a source string is a training or a test string is decided by its
own hash, so the splits are disjoint whatever the alphabet, the lengths and the number of records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from envs.tools.calculator import Calculator, calculate
from envs.tools.environment import ToolRules, tool_env
from envs.tools.parsing import parse_angle
from streamrl.environment import Env, Record, SingleTurnTask, Step
from streamrl.errors import TaskError

ALPHABET = "abcdefghij"
TEST_SHARE = 8
"""One source string in this many belongs to the test split."""


def _pair_sum(text: str, alphabet: str) -> str:
    """Letter i plus its mirror image, as numbers of the alphabet: x_i + x_(L-1-i) modulo its size."""
    values = [alphabet.index(letter) for letter in text]
    return "".join(alphabet[(a + b) % len(alphabet)] for a, b in zip(values, reversed(values), strict=True))


OPERATIONS: dict[str, Callable[[str, str], str]] = {
    "copy": lambda text, _: text,
    "reverse": lambda text, _: text[::-1],
    "rotate": lambda text, _: text[1:] + text[:1],
    "swap": lambda text, _: "".join(text[i : i + 2][::-1] for i in range(0, len(text), 2)),
    "sort": lambda text, _: "".join(sorted(text)),
    "unique": lambda text, _: "".join(dict.fromkeys(text)),
    "pair_sum": _pair_sum,
}


def partial_credit(answer: str, completion: str) -> float:
    """Share of positions that are right, over the longer of the two lengths: 1.0 only for the exact answer."""
    longer = max(len(answer), len(completion))
    if longer == 0:
        return 1.0
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / longer


class StringTask(SingleTurnTask):
    """Transform a string; reward is partial credit, score is exact match.

    Args:
        operation: one of `OPERATIONS`.
        min_length, max_length: letters of the source string, both included; drawn uniformly.
        alphabet: distinct characters the strings are made of.
        num_train, num_test: records per split.
        seed: another seed is another stream of records over the same two disjoint sets.
    """

    def __init__(
        self, operation: str = "reverse", *, min_length: int = 3, max_length: int = 6, alphabet: str = ALPHABET,
        num_train: int = 1_000_000, num_test: int = 200, seed: int = 0,
    ) -> None:
        if operation not in OPERATIONS:
            raise TaskError(f"string operation {operation!r} is unknown: choose one of {', '.join(OPERATIONS)}.")
        if not 1 <= min_length <= max_length:
            raise TaskError(f"lengths must satisfy 1 <= min_length <= max_length, got {min_length} and {max_length}.")
        if len(alphabet) < 2 or len(set(alphabet)) != len(alphabet):
            raise TaskError(f"alphabet must hold at least two distinct characters, got {alphabet!r}.")
        if len(alphabet) ** max_length < 1000:
            raise TaskError(
                f"{len(alphabet)} letters and at most {max_length} positions make too few strings to split into train "
                "and test: use a larger alphabet or max_length."
            )
        self.name, self.operation = f"string.{operation}", operation
        self.min_length, self.max_length, self.alphabet = min_length, max_length, alphabet
        self.num_train, self.num_test, self.seed = num_train, num_test, seed

    def record(self, split: str, index: int) -> Record:
        rng = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            length = rng.randint(self.min_length, self.max_length)
            text = "".join(rng.choices(self.alphabet, k=length))
            if is_test(text) == (split != "train"):
                return {"prompt": text, "answer": OPERATIONS[self.operation](text, self.alphabet)}

    def reward(self, record: Record, completion: str) -> Step:
        answer = str(record["answer"])
        return Step(reward=partial_credit(answer, completion), score=float(completion == answer))

    def target(self, record: Record) -> str:
        """The right completion, for a supervised warm start."""
        return str(record["answer"])


def is_test(text: str, share: int = TEST_SHARE) -> bool:
    """Whether a text belongs to the test split, as one in `share` does: a function of the text alone."""
    return blake2b(text.encode(), digest_size=4).digest()[0] % share == 0


OPERATORS = "+-*"
MAX_ANSWER_CHARS = 20


class ToolArithmetic(SingleTurnTask):
    """The value of an expression; `<...>` asks the calculator, any other text is the answer.

        prompt   37*45      model   <37*45>      calculator   1665      model   1665

    Products of two numbers are beyond a model of a hundred thousand parameters; to call the tool without errors and to
    repeat what it says is not.

    Reward is the share of positions of the answer that are right, score is exact match.

    Args:
        operators: what the expressions hold, of + - *.
        max_digits: of each number.
        max_turns: the text of this turn is the answer, whatever it holds; env.max_turns should be the same.
        num_train, num_test: records per split.
        seed: another seed is another stream of records over the same two disjoint sets.
    """

    name = "tool.arithmetic"

    def __init__(
        self, *, operators: str = OPERATORS, max_digits: int = 2, max_turns: int = 3, num_train: int = 1_000_000,
        num_test: int = 200, seed: int = 0,
    ) -> None:
        if not operators or not set(operators) <= set(OPERATORS):
            raise TaskError(f"operators={operators!r}: give one or more of {OPERATORS}.")
        if not 1 <= max_digits <= 6:
            raise TaskError(f"max_digits={max_digits} must lie between 1 and 6.")
        self.operators, self.max_digits, self.seed = operators, max_digits, seed
        self.num_train, self.num_test = num_train, num_test
        self._tools = [Calculator()]
        self._rules = ToolRules(
            parse_angle, max_turns=max_turns, max_output_chars=MAX_ANSWER_CHARS, describe=False, error_text="?"
        )

    def record(self, split: str, index: int) -> Record:
        rng = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            a, b = (rng.randrange(10**self.max_digits) for _ in range(2))
            expression = f"{a}{rng.choice(self.operators)}{b}"
            if is_test(expression) == (split != "train"):
                return {"prompt": expression, "answer": calculate(expression)}

    def reward(self, record: Record, completion: str) -> Step:
        answer = str(record["answer"])
        return Step(reward=partial_credit(answer, completion), score=float(completion == answer))

    def env(self) -> Env:
        return tool_env(super().env(), self._tools, self._rules)

    def target(self, record: Record) -> str:
        """The answer itself: who knows it need not ask."""
        return str(record["answer"])

    def target_turns(self, record: Record) -> Sequence[str]:
        """A call, what the calculator says, and the answer, for a supervised warm start."""
        return f"<{record['prompt']}>", str(record["answer"]), str(record["answer"])
