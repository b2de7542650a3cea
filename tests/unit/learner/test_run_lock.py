"""One learner per run, and an epoch that is never used twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.checkpoint.run_lock import lock_run_dir
from streamrl.errors import RunLockedError

ROOT = Path(__file__).parents[3]


def test_every_lock_is_a_new_epoch_that_is_on_disk_before_it_is_returned(tmp_path):
    epochs = []
    for _ in range(3):
        lock = lock_run_dir(tmp_path / "run")
        epochs.append(lock.learner_epoch)
        assert (tmp_path / "run" / "EPOCH").read_text() == f"{lock.learner_epoch}\n"
        lock.release()
    assert epochs == [1, 2, 3]


def test_a_running_learner_holds_the_lock_and_an_exited_one_does_not(tmp_path):
    hold = (
        "import sys; from learner.checkpoint.run_lock import lock_run_dir; c = lock_run_dir(sys.argv[1]); "
        "print('held', flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunLockedError, match="still running"):
            lock_run_dir(tmp_path)
    finally:
        holder.kill()
        holder.communicate(timeout=30)

    lock = lock_run_dir(tmp_path)
    assert lock.learner_epoch == 2
    lock.release()


@pytest.mark.parametrize("epoch_file", [None, b"", b"garbage"])
def test_a_lost_epoch_file_does_not_repeat_an_epoch_that_a_checkpoint_knows(tmp_path, epoch_file):
    (tmp_path / "ckpt-00000003").mkdir()
    body = {"extra": {"learner_epoch": 7}}
    (tmp_path / "ckpt-00000003" / "manifest.json").write_text(json.dumps({"body": body}))
    (tmp_path / "ckpt-00000004").mkdir()
    (tmp_path / "ckpt-00000004" / "manifest.json").write_text("damaged")
    if epoch_file is not None:
        (tmp_path / "EPOCH").write_bytes(epoch_file)

    lock = lock_run_dir(tmp_path)

    assert lock.learner_epoch == 8
    lock.release()


def test_a_newer_epoch_on_disk_fences_the_older_learner(tmp_path):
    lock = lock_run_dir(tmp_path)
    assert lock.is_owner()
    lock.check()

    (tmp_path / "EPOCH").write_text("2\n")

    assert not lock.is_owner()
    with pytest.raises(RunLockedError, match="EPOCH is 2, this learner has epoch 1"):
        lock.check()
    lock.release()
