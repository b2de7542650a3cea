"""The score of countdown: all given numbers, each once, make the target. The answer is parsed, never evaluated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from envs.tools.calculator import WRITTEN, calculate
from envs.tools.tool import ToolError

_ARITHMETIC = re.compile(rf"[\d\s()+\-*/{''.join(WRITTEN)}]+")
WRONG = 0.05
"""reasoning_gym's score of an expression that does not solve the question."""


def score_countdown(answer: str, entry: Mapping[str, Any]) -> float:
    """1 for a solution, WRONG for another expression of numbers and + - * /, 0 for anything else."""
    if not _ARITHMETIC.fullmatch(answer):
        return 0.0
    try:
        value = float(calculate(answer))
    except ToolError:
        return 0.0
    numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
    uses_all = sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers)
    return 1.0 if uses_all and math.isclose(value, target, rel_tol=1e-5, abs_tol=1e-6) else WRONG
