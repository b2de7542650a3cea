"""Every setting has a test that shows its effect, which is marked with it: `@pytest.mark.shows("staleness.eta")`."""

from __future__ import annotations

import ast
from pathlib import Path

from streamrl.config.catalog import kinds

TESTS = Path(__file__).parents[2]


def marked() -> set[str]:
    """Settings that tests are marked with."""
    marks = [
        mark for path in TESTS.rglob("test_*.py") if "shows(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows"
    ]
    return {ast.literal_eval(name) for mark in marks for name in mark.args}


def test_every_setting_and_nothing_else_is_shown_by_a_test():
    assert marked() ^ kinds().keys() == set()
