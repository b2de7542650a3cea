"""`status.json`: what the live view reads, and how the run ended."""

import json
import os
import tempfile
import time
from contextlib import suppress

import pytest

from learner.hub.server import HubServer
from learner.hub_client.link import HubLink
from learner.hub_client.settings import hub_settings
from tests.kit.system import until
from tests.unit.config.setting_harness import VOCAB_SIZE, LiveHub, config_of
from tests.unit.hub.factories import run_started


def test_before_the_first_version_the_run_is_starting(tmp_path):
    with LiveHub(tmp_path, config_of("trainer.num_steps=7")):
        until((tmp_path / "status.json").exists)
        status = json.loads((tmp_path / "status.json").read_text())

    assert (status["state"], status["version"], status["total_steps"], status["actors"]) == ("starting", 0, 7, [])


@pytest.mark.parametrize(("finished", "state"), [(True, "finished"), (False, "stopped")])
def test_the_status_of_the_last_second_does_not_replace_the_final_one(tmp_path, finished, state):
    with tempfile.TemporaryDirectory(prefix="hub-") as home:
        server = HubServer(hub_settings(
            config_of(), started=run_started(), run_dir=tmp_path, lineage=(), dp_ranks=(0,),
            bind="tcp://127.0.0.1:0", rank_endpoint=f"ipc://{home}/ranks", shm_dir=tmp_path, vocab_size=VOCAB_SIZE,
            restore_path=None,
        ))
        link = HubLink(
            f"ipc://{home}/ranks", rank=0, world=1, version=0, check_hub=lambda: None, stop_requested=lambda: False,
            stall_report_s=60, stall_fail_s=0,
        )
        link.shutdown("that was all", finished=finished)

        server.run(lambda: False)  # the shutdown arrives in the iteration in which a status is due
        server.close()
        link.close()

    assert json.loads((tmp_path / "status.json").read_text())["state"] == state


def test_a_full_disk_under_the_status_does_not_end_the_hub(tmp_path, caplog):
    beside = tmp_path / f".status.json.{os.getpid()}"
    with LiveHub(tmp_path, config_of()) as hub:
        deadline = time.monotonic() + 60
        while not (tmp_path / "status.json").exists():
            assert time.monotonic() < deadline
            hub.link.refresh_status()
        (tmp_path / "status.json").unlink()
        while "status.json was not written" not in caplog.text:
            with suppress(FileExistsError):  # a failed write removes it
                beside.symlink_to("/dev/full")
            assert time.monotonic() < deadline
            hub.link.refresh_status()
        beside.unlink(missing_ok=True)
        while not (tmp_path / "status.json").exists():
            assert time.monotonic() < deadline
            hub.link.refresh_status()

    assert "the run continues" in caplog.text and "No space left" in caplog.text
