"""One round of `python -m tests.chaos.full_disk`: a disk that is full for six seconds ends nothing."""

import warnings
from pathlib import Path

import pytest

from tests.chaos.full_disk import NoMount, play
from tests.flow.forked_process import ForkedPopen


def test_a_run_survives_a_disk_that_is_full_for_six_seconds_and_resumes(tmp_path: Path, fork_server):
    try:
        result = play(1, tmp_path / "round", ForkedPopen)
    except NoMount as error:
        warnings.warn(f"THE TEST OF A FULL DISK DID NOT RUN: nothing can be mounted here: {error}", stacklevel=1)
        pytest.skip(f"nothing can be mounted here: {error}")
    assert result["ok"]
