"""What the tests of the hub share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from learner.hub.ledger.cut import LagProof
from tests.unit.config.setting_harness import tiny_model
from tests.unit.hub.broadcast_harness import BroadcastHarness


@pytest.fixture(autouse=True)
def every_batch_is_proved(monkeypatch):
    """Read every batch from its frames, not only each sixteenth: see `learner.hub.ledger.cut`."""
    monkeypatch.setattr(LagProof, "frames_every", 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def harness(tmp_path, model_dir) -> Iterator[Callable[..., BroadcastHarness]]:
    harnesses: list[BroadcastHarness] = []

    def make(*words: str, **options) -> BroadcastHarness:
        harnesses.append(BroadcastHarness(tmp_path, model_dir, *words, **options))
        return harnesses[-1]

    yield make
    for one in harnesses:
        one.hub.__exit__()
