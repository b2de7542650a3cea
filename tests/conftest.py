import inspect
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.flow.fork_server import running
from tests.kit.loops import run
from tests.slow import is_slow

TESTS = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def own_state() -> Iterator[None]:
    """A state directory of the tests' own, for example for the key that signs runs: the user's is left alone."""
    with tempfile.TemporaryDirectory(prefix="streamrl-state-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """While there is one, `ForkedPopen` forks; where nothing can be forked it starts a new Python."""
    with running(tmp_path_factory.mktemp("fork_server")) if sys.platform == "linux" else nullcontext():
        yield


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """A command that a test calls in this process makes files for its owner alone; later tests do not."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a loop of its own; `tests.kit.loops` has one whose clock jumps."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(lambda: pyfuncitem.obj(**given), loop_factory=getattr(pyfuncitem.obj, "loop_factory", None))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `tests/slow.py` lists, and let the records of torch pass to the root logger.

    pytest hangs its handler on every logger that passes nothing on, six times a test: torch has forty of them.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith(("torch", "strobelight")):
            logger.propagate = True
    for item in items:
        if is_slow(item.path.relative_to(TESTS).as_posix(), getattr(item, "originalname", item.name), item.name):
            item.add_marker(pytest.mark.slow)
