"""Arithmetic with a calculator: a task of two turns for a model with one token for each character.

    prompt   37*45      model   <37*45>      calculator   1665      model   1665

Products of two numbers are beyond a model of a hundred thousand parameters; to call the tool without errors and to
repeat what it says is not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from envs.tasks.strings import is_test, partial_credit
from envs.tools.calculator import Calculator, calculate
from envs.tools.environment import ToolRules, tool_env
from envs.tools.parsing import parse_angle
from streamrl.environment import Env, Record, SingleTurnTask, Step
from streamrl.errors import TaskError

OPERATORS = "+-*"
MAX_ANSWER_CHARS = 20


class ToolArithmetic(SingleTurnTask):
    """The value of an expression; `<...>` asks the calculator, any other text is the answer.

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
