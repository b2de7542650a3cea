"""What the tests of the hub share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.config.setting_harness import tiny_model
from tests.unit.hub.broadcast_harness import Scene


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scene(tmp_path, model_dir) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(*words: str, **options) -> Scene:
        scenes.append(Scene(tmp_path, model_dir, *words, **options))
        return scenes[-1]

    yield make
    for one in scenes:
        one.hub.__exit__()
