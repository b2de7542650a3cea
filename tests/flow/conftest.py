import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import RunHarness

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and give it time for whole runs on a busy machine."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.flow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunHarness]:
    """Its processes are forked where that is possible, unless the test is marked `fresh_processes`."""
    forks = request.node.get_closest_marker("fresh_processes") is None
    if forks:
        request.getfixturevalue("fork_server")
    harness = RunHarness(tmp_path, ForkedPopen if forks else subprocess.Popen)
    yield harness
    harness.close()


@pytest.fixture
def forked_children(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the code under test starts from this process are forked."""
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
