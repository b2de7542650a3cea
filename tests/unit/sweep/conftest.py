"""A folder for sweeps with a small program in place of the learner."""

import os
from pathlib import Path

import pytest

from tests.fakes.programs import SCORED_LEARNER, write_programs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    write_programs(tmp_path, SCORED_LEARNER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    return tmp_path
