"""A hub whose ranks are on other machines: it listens on an address, and only the keys of this start get in."""

import msgspec
import pytest

from learner.hub.server import HubServer
from learner.hub_client import link
from learner.hub_client.endpoint import RankDoor, RankEndpoint, spans_machines
from learner.hub_client.link import HubLink
from streamrl.config.addresses import in_url
from streamrl.errors import StreamrlError
from streamrl.transport.keys import VARIABLE, KeyPair, RankKeys
from tests.unit.config.setting_harness import LiveHub, config_of


@pytest.fixture(params=["127.0.0.1", "::1"])
def hub(tmp_path, monkeypatch, request):
    keys = RankKeys.new()
    monkeypatch.setattr(
        "tests.unit.config.setting_harness.HubServer",
        lambda settings, **options: HubServer(
            msgspec.structs.replace(settings, rank_endpoint=f"tcp://{in_url(request.param)}:0"), rank_keys=keys,
            **options
        ),
    )

    def connect(endpoint, **options):
        door = RankDoor("tcp://127.0.0.1:0", keys)
        monkeypatch.setenv("MASTER_ADDR", request.param)
        found = door.endpoint(tmp_path, 1, lambda: None)
        return HubLink(found.address, key=found.key, **options)

    monkeypatch.setattr("tests.unit.config.setting_harness.HubLink", connect)
    with LiveHub(tmp_path, config_of()) as live:  # it is made once its own link has had an answer
        live.address = RankDoor("tcp://127.0.0.1:0", keys).endpoint(tmp_path, 1, lambda: None).address
        live.keys = keys
        yield live


@pytest.mark.parametrize("who", ["plain", "another key"])
def test_without_the_key_of_this_start_there_is_no_answer(hub, monkeypatch, who):
    monkeypatch.setattr(link, "HUB_SILENT_S", 1.0)
    key = None if who == "plain" else RankKeys(hub.keys.server, KeyPair.new()).key
    other = HubLink(
        hub.address, rank=1, world=2, version=0, check_hub=lambda: None, stop_requested=lambda: False,
        stall_report_s=60, stall_fail_s=0, key=key,
    )
    try:
        with pytest.raises(StreamrlError, match="presumed dead"):
            other.wait_until_up()
        hub.link.refresh_status()  # the right one is still served
    finally:
        other._socket.setsockopt(link.zmq.LINGER, 0)
        other.close()


def test_an_endpoint_travels_as_bytes_and_keys_in_the_environment(monkeypatch):
    keys = RankKeys.new()
    assert RankEndpoint.decode(RankEndpoint("tcp://h:1", keys.key).encode()) == RankEndpoint("tcp://h:1", keys.key)
    assert RankEndpoint.decode(RankEndpoint("ipc://x").encode()) == RankEndpoint("ipc://x")
    monkeypatch.setenv(VARIABLE, keys.environment()[VARIABLE])
    assert RankKeys.from_environment() == keys
    monkeypatch.delenv(VARIABLE)
    assert RankKeys.from_environment() is None


@pytest.mark.parametrize(("world", "local", "several"), [("4", "2", True), ("2", "2", False), ("2", None, False)])
def test_ranks_of_one_machine_keep_their_socket_file(monkeypatch, world, local, several):
    monkeypatch.setenv("WORLD_SIZE", world)
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert spans_machines() is several
    assert RankDoor.make().bind.startswith("tcp://" if several else "ipc://")
