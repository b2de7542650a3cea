"""The hub as a thread of its learner's process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from learner.hub_client.endpoint import RankDoor
from learner.hub_client.link import HubLink
from learner.hub_client.settings import hub_settings
from learner.hub_client.thread import HubThread
from streamrl.errors import StreamrlError
from tests.kit.system import until
from tests.unit.config.setting_harness import config_of
from tests.unit.hub.factories import run_started


def hub_at(folder: Path, bind: str) -> tuple[HubThread, str]:
    (folder / "run").mkdir()
    address = RankDoor.make().bind
    return HubThread(hub_settings(
        config_of(f"hub.bind={bind}"), started=run_started("threads"), run_dir=folder / "run", lineage=(),
        dp_ranks=(0,), bind=bind, rank_endpoint=address, shm_dir=folder / "shm", vocab_size=100, restore_path=None,
    )), address


def test_it_answers_and_ends_with_its_learners_last_word(tmp_path):
    hub, address = hub_at(tmp_path, "tcp://127.0.0.1:0")
    link = HubLink(
        address, rank=0, world=1, version=0, check_hub=hub.check, stop_requested=lambda: False, stall_report_s=60,
        stall_fail_s=0,
    )
    link.wait_until_up()
    hub.check()
    link.shutdown("the run is finished", finished=True)
    hub.wait(30)
    link.close()
    with pytest.raises(StreamrlError, match="the hub has ended"):
        hub.check()
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_an_abandoned_one_ends(tmp_path):
    hub, address = hub_at(tmp_path, "tcp://127.0.0.1:0")
    until((tmp_path / "run" / "hub.json").exists)
    hub.abandon()
    assert not hub._thread.is_alive() and not Path(address.removeprefix("ipc://")).parent.exists()


def test_the_learner_hears_why_it_failed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hub, _ = hub_at(tmp_path, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        hub.wait(30)
        with pytest.raises(StreamrlError, match="the hub has ended: hub.bind"):
            hub.check()
