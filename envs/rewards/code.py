"""Grade a program by its test cases, in the sandbox of this machine or by a service over HTTP."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any

import httpx

from envs.data.shapes import RecordShape, code_tests
from envs.rewards.extract import last_code_block
from envs.rewards.workers import num_workers
from envs.sandbox import Call, Case, Execution, Limits, SandboxPool
from envs.thoughts import spoken
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record, Step

REL_TOL, ABS_TOL = Decimal("1e-5"), Decimal("1e-8")
"""The tolerances of numpy.allclose, for two numbers of which neither is written as an integer."""
WHOLE_TOL = Decimal("1e-4")
"""The largest distance of a decimal from an integer: 3.0000004 is 3, and 1000000.4 is not 1000000."""
_INTEGER = re.compile(r"([+-]?)0*(\d+)", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,15})?", re.ASCII)
_INFINITE = re.compile(r"([+-]?)inf(?:inity)?", re.IGNORECASE)
_ROUNDED = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""For differences: numbers may have a million digits, and any exponent."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A number of JSON as it is written, NaN and Infinity included."""

    text: str


def matches(output: str, expected: str, *, any_order: bool = False) -> bool:
    """Equal, from strict to lenient: whole texts, lines, words of lines, numbers of lines.

    Args:
        any_order: also accept the words of each line in another order; wrong for tasks where the order is the answer.
    """
    if output.strip() == expected.strip():
        return True
    left, right = _lines(output), _lines(expected)
    if len(left) != len(right):
        return False
    if left == right or all(_same_numbers(a, b) for a, b in zip(left, right, strict=True)):
        return True
    return any_order and all(sorted(a) == sorted(b) for a, b in zip(left, right, strict=True))


def same_value(returned: str, expected: str) -> bool:
    """Whether a returned value, as JSON, is the expected one, or the only item of an expected list.

    Numbers are compared as they are written, never as floats: two whole numbers are equal or they are not, however
    large. Those with a decimal point or an exponent may differ as printed floats do, at every depth of a list.
    Types count: 1 is neither true nor "1"; but 3.0 is 3. An expected text that is no JSON is a text.
    """
    value, right = _read(returned), _read(expected)
    return _same(value, right) or (isinstance(right, list) and len(right) == 1 and _same(value, right[0]))


def close(left: str, right: str) -> bool:
    """Whether two words are equal, or numbers that are equal as far as printed floats show them."""
    if left == right:
        return True
    whole = [_INTEGER.fullmatch(word) for word in (left, right)]
    if whole[0] and whole[1]:
        return whole[0][2] == whole[1][2] and (whole[0][2] == "0" or _is_below(left) == _is_below(right))
    if not (_DECIMAL.fullmatch(left) and _DECIMAL.fullmatch(right)):
        endless = [_INFINITE.fullmatch(word) for word in (left, right)]
        return all(endless) and _is_below(left) == _is_below(right)
    a, b = Decimal(left), Decimal(right)
    if a == b:
        return True
    size = _ROUNDED.max(_ROUNDED.abs(a), _ROUNDED.abs(b))
    most = _ROUNDED.max(_ROUNDED.multiply(REL_TOL, size), ABS_TOL)
    if any(whole):
        most = _ROUNDED.min(most, WHOLE_TOL)
    return _ROUNDED.abs(_ROUNDED.subtract(a, b)) <= most


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines() if line.strip()]


def _same_numbers(left: list[str], right: list[str]) -> bool:
    return len(left) == len(right) and all(close(a, b) for a, b in zip(left, right, strict=True))


def _is_below(number: str) -> bool:
    return number.startswith("-")


def _read(text: str) -> Any:
    """The JSON value of a text with its numbers as they are written; the text itself if it is none."""
    try:
        return json.loads(text, parse_int=_Written, parse_float=_Written, parse_constant=_Written)
    except (ValueError, RecursionError):
        return text


def _same(value: Any, expected: Any) -> bool:
    pairs = [(value, expected)]  # not recursive: a program may return a list of any depth
    while pairs:
        left, right = pairs.pop()
        if type(left) is not type(right):
            return False
        if isinstance(left, list):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif isinstance(left, dict):
            if left.keys() != right.keys():
                return False
            pairs += ((left[key], right[key]) for key in left)
        elif not close(left.text, right.text) if isinstance(left, _Written) else left != right:
            return False
    return True


PASS, WRONG, RUNTIME_ERROR, COMPILE_ERROR = True, False, -1, -2
"""Results of one case, as code-verifier services report them."""
LEVELS = {"auto": "auto", "limited": "1", "isolated": "2"}
BATCH = 8
"""Cases that a sandbox runs before we look at their results; after a failure the rest is not run."""


class Code:
    """Full reward if every test case passes, and the program stood in a fence of Python."""

    may_block = True
    system_prompt = "Answer with one Python program in a fence that starts with ```python."

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._settings = settings
        self._pool: SandboxPool | None = None
        self._lock = threading.Lock()

    def target(self, record: Record, answer: str) -> str:
        return f"```python\n{answer}\n```"

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        code = self._settings.code
        program, formatted = last_code_block(spoken(completion))
        tests = code_tests(record)
        if code.url is not None:
            results = ask_verifier(code.url, tests, program, code.case_timeout_s, code.total_timeout_s)
        else:
            results = grade_program(
                self._sandboxes(), program, tests,
                partial=code.partial, any_order=code.any_order, total_s=code.total_timeout_s,
            )  # fmt: skip
        num_passed = float(sum(result is PASS for result in results))
        passed = num_passed / len(tests["inputs"])
        correct = passed if code.partial else float(passed == 1.0)
        reward = self._settings.correct * correct * formatted
        parts = {"format_acc": float(formatted), "ans_acc": correct, "tests_passed": num_passed}
        return Step(reward=reward, score=correct, parts=parts)

    def _sandboxes(self) -> SandboxPool:
        """Made at the first call: the learner asks for a reward's prompt and never grades."""
        with self._lock:
            if self._pool is None:
                code = self._settings.code
                limits = Limits(timeout_s=code.case_timeout_s, memory_bytes=code.memory_mb << 20)
                self._pool = SandboxPool(LEVELS[code.sandbox], num_workers(self._settings), limits)
            return self._pool


def grade_program(
    pool: SandboxPool, program: str, tests: Mapping[str, Any], *, partial: bool, any_order: bool, total_s: float,
    case_timeout_s: float | None = None,
) -> list[bool | int]:
    """Results of the cases in order; without `partial` the list ends with the first case that fails."""
    name, results = tests.get("fn_name"), []
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    for start in range(0, len(pairs), BATCH):
        some = pairs[start : start + BATCH]
        cases = [Case(call=Call(name, _arguments(text))) if name else Case(stdin=text) for text, _ in some]
        outcomes = pool.run(program, cases, total_s, case_timeout_s)
        for outcome, (_, expected) in zip(outcomes, some, strict=False):
            results.append(_result(outcome, expected, name is not None, any_order))
            if results[-1] is not PASS and not partial:
                return results
        total_s -= sum(outcome.seconds for outcome in outcomes)
        if len(outcomes) < len(some) or total_s <= 0:
            break  # the program ended its sandbox, or its time is over
    return results


def _arguments(text: str) -> tuple[str, ...]:
    """Arguments of a call, one for each line; not `splitlines`, which splits texts at other characters too."""
    return tuple(text.replace("\r\n", "\n").removesuffix("\n").split("\n")) if text else ()


def _result(outcome: Execution, expected: str, called: bool, any_order: bool) -> bool | int:
    if outcome.status != "ok":
        return COMPILE_ERROR if outcome.status == "compile_error" else RUNTIME_ERROR
    if not called:
        return matches(outcome.stdout, expected, any_order=any_order)
    return same_value(outcome.value or "null", expected)


def ask_verifier(
    url: str, tests: Mapping[str, Any], program: str, case_timeout_s: float, total_timeout_s: float
) -> list[bool | int]:
    """Results from a service: POST {in_outs, generation, timeout, debug} gives {result, metadata}.

    Raises httpx.HTTPError if it does not answer, ValueError if the answer is none.
    """
    payload = {"in_outs": dict(tests), "generation": program, "timeout": case_timeout_s, "debug": False}
    response = httpx.post(url, json=payload, timeout=total_timeout_s)
    response.raise_for_status()
    results = response.json().get("result")
    if not isinstance(results, list) or not all(isinstance(result, bool | int) for result in results):
        raise ValueError(f"reward.code.url={url} answered {response.text!r:.80}: `result` must be a list of results.")
    return [bool(result) if result in (0, 1) else int(result) for result in results]
