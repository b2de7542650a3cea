from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.processes import RunHarness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RunHarness]:
    harness = RunHarness(tmp_path)
    yield harness
    harness.close()
