"""Grade a program by its test cases, in the sandbox of this machine or by a service over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from envs.data.shapes import RecordShape, code_tests
from envs.rewards.extract import last_code_block
from envs.rewards.output_match import matches, same_value
from envs.rewards.thoughts import spoken
from envs.rewards.workers import num_workers
from envs.sandbox import Call, Case, Execution, Limits, SandboxPool
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record, Step

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
        passed = sum(result is PASS for result in results) / len(tests["inputs"])
        correct = passed if code.partial else float(passed == 1.0)
        reward = self._settings.correct * correct * formatted
        return Step(reward=reward, score=correct, parts={"format_acc": float(formatted), "ans_acc": correct})

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
