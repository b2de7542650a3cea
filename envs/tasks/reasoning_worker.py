"""A process that scores answers to reasoning_gym questions: [data set, options, seed, draw, question, answer] in.

Some of the package's scorers call `eval` or sympy's `parse_expr`, which is `eval`, on what the model wrote. The process
is confined (envs/sandbox/confined.py), so that nothing can come of it. While an answer is scored, `eval` also knows
only literals and mathematics, so that no answer changes its own score or that of others.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from envs.sandbox.confined import serve
from envs.tasks.reasoning import entry_of, make_dataset, package, score_of

_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Call, ast.Load,
    ast.Tuple, ast.List,
)  # fmt: skip
_WORD = re.compile(r"[\w.+-]*")
"""Texts that sympy writes into what it evaluates: names of symbols, digits of numbers."""


def main() -> None:
    package()  # takes seconds: before the worker says that it is ready
    serve(prepare, float(sys.argv[1]))


def prepare(question: Any) -> Callable[[], float]:
    """The scorer of this answer. Raises TaskError if the question cannot be drawn again."""
    name, options, seed, draw, text, answer = question
    dataset, entries = _dataset(name, json.dumps(options), seed)
    entry = entry_of(entries, draw, text, name)

    def score() -> float:
        with checked_eval():
            return score_of(dataset.score_answer, answer, entry)

    return score


@lru_cache(maxsize=16)
def _dataset(name: str, options: str, seed: int) -> tuple[Any, Callable[[int], Any]]:
    dataset = make_dataset(name, json.loads(options), seed)
    return dataset, lru_cache(maxsize=256)(dataset.__getitem__)


@contextmanager
def checked_eval() -> Iterator[None]:
    """Inside, `eval` raises ValueError for everything but literals, operators and sympy's own functions of them."""
    own = builtins.eval

    def checked(source: Any, names: dict[str, Any] | None = None, local: Mapping[str, Any] | None = None) -> Any:
        if not isinstance(source, str):
            raise ValueError("only texts are evaluated here")
        try:
            return ast.literal_eval(source)
        except (ValueError, SyntaxError):
            names = {} if names is None else names
            check(source, names, local or {})
            return own(source, names, local)

    builtins.eval = checked
    try:
        yield
    finally:
        builtins.eval = own


def check(source: str, names: Mapping[str, Any], local: Mapping[str, Any]) -> None:
    """Raise ValueError or SyntaxError unless this is arithmetic on numbers, symbols and functions of sympy."""
    import sympy

    for node in ast.walk(ast.parse(source.strip(), mode="eval")):
        ok = isinstance(node, _NODES)
        if isinstance(node, ast.Call):
            ok = isinstance(node.func, ast.Name) and not node.keywords
        elif isinstance(node, ast.Constant):
            ok = not isinstance(node.value, str | bytes) or _WORD.fullmatch(str(node.value)) is not None
        elif isinstance(node, ast.Name):
            found = local.get(node.id, names.get(node.id))
            is_class = isinstance(found, type) and issubclass(found, sympy.Basic)
            ok = is_class or isinstance(found, sympy.Basic) or _module(found).startswith("sympy.functions.")
        if not ok:
            raise ValueError(f"{ast.unparse(node)!r:.60} is not mathematics")


def _module(value: object) -> str:
    return str(getattr(value, "__module__", ""))


if __name__ == "__main__":
    main()
