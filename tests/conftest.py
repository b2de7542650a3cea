from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow import is_slow

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `tests/slow.py` lists."""
    for item in items:
        if is_slow(item.path.relative_to(TESTS).as_posix(), getattr(item, "originalname", item.name), item.name):
            item.add_marker(pytest.mark.slow)
