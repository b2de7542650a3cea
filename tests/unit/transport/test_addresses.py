"""Addresses of sockets: those of IPv6, and paths of a machine whose folder for temporary files has a long one."""

import os
import shutil
import tempfile
import threading
from pathlib import Path
from socket import AF_INET, AF_INET6
from types import SimpleNamespace

import httpx
import pytest
import zmq

from actors.engines.vllm.process import environment
from actors.settings import make_endpoint
from envs.rewards.verifier_server import checking
from learner.hub_client.endpoint import RankDoor
from learner.setup.preflight import check_port
from streamrl.config.addresses import reach_directly
from streamrl.errors import ConfigError, StreamrlError
from streamrl.transport import sockets
from streamrl.transport.control import ControlServer, ask, note
from streamrl.weights.transport import reachable
from tests.fakes.service import in_thread
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model

LONGEST = 107
"""Bytes of a path that a socket of Linux can have."""


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_sockets_of_this_machine_have_a_path_that_the_kernel_takes(long_folder, monkeypatch):
    context = zmq.Context()
    server = ControlServer(context, lambda request: {"heard": request["verb"]})
    answers: list = []
    asking = threading.Thread(target=lambda: answers.append(ask(note(server.endpoint), "the hub", verb="status")))
    asking.start()
    while asking.is_alive():
        server.socket.poll(20)
        server.serve()
    server.close()
    assert answers == [{"heard": "status"}] and not list(long_folder.iterdir())

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    door = RankDoor.make()
    with context.socket(zmq.ROUTER) as router:
        router.bind(door.bind)
    shutil.rmtree(Path(door.bind.removeprefix("ipc://")).parent)
    context.term()
    with environment("mark", "cuda", None, eager=False):
        assert len(os.environ["VLLM_RPC_BASE_PATH"]) + 37 <= LONGEST


def test_without_a_short_folder_the_variable_is_named(long_folder, monkeypatch):
    monkeypatch.setattr(sockets.os, "access", lambda *_: False)
    with pytest.raises(StreamrlError, match="set TMPDIR to a shorter path"):
        sockets.socket_root()


def test_a_short_folder_for_temporary_files_is_that_for_sockets(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert sockets.socket_root() == short


def test_a_hub_listens_at_an_address_of_ipv6_and_serves_weights_there(tmp_path):
    config = config_of("hub.bind=tcp://[::1]:0")
    check_port(config.hub.bind, "hub.bind")
    with LiveHub(tmp_path, config) as live:
        assert live.server.endpoint.startswith("tcp://[::1]:") and reachable(live.server.endpoint)
        weights = live.server.context.weights.endpoint
        assert weights.startswith("tcp://[::1]:") and reachable(weights)
        live.publish(0, tiny_model(tmp_path / "model"))
        (offer,) = (offer for offer in live.connect().join().offers if offer.transport == "zmq")
        assert offer.name == weights


@pytest.mark.parametrize("advertise", [None, "::1", "[::1]"])
async def test_agents_are_served_at_an_address_of_ipv6(advertise):
    words = [] if advertise is None else [f"actors.endpoint.advertise={advertise!r}"]

    endpoint = make_endpoint(config_of("actors.endpoint.bind='[::1]:0'", *words))
    async with endpoint.session(SimpleNamespace(full="", max_tokens=9)) as session:
        assert session.base_url.startswith("http://[::1]:")
        async with httpx.AsyncClient(headers={"x-api-key": session.api_key}) as asks:
            told = await asks.get(f"{session.base_url}/models")
            assert told.json()["data"][0]["max_model_len"] == 9
    await endpoint.close()


@pytest.mark.parametrize(("addresses", "told"), [
    ([(AF_INET6, "fe80::1%eth0"), (AF_INET6, "fd00::7"), (AF_INET, "10.0.0.5")], "http://10.0.0.5:"),
    ([(AF_INET6, "fe80::1%eth0"), (AF_INET6, "fd00::7")], "http://[fd00::7]:"),
])
async def test_the_name_of_an_interface_stands_for_its_address(addresses, told, monkeypatch):
    found = {"eth0": [SimpleNamespace(family=kind, address=one) for kind, one in addresses], "tun0": []}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    assert (await served_at("eth0")).startswith(told) and (await served_at("eth1")).startswith("http://eth1:")
    with pytest.raises(ConfigError, match="actors.endpoint.advertise=tun0 is an interface of this machine without"):
        await served_at("tun0")


async def served_at(advertise: str) -> str:
    """The address that an agent is told."""
    endpoint = make_endpoint(config_of(f"actors.endpoint.advertise={advertise}"))
    async with endpoint.session(SimpleNamespace(full="", max_tokens=9)) as session:
        told = session.base_url
    await endpoint.close()
    return told


def test_programs_are_verified_at_an_address_of_ipv6():
    with in_thread(checking(None, "::1", 0)) as (host, port):
        assert host == "::1" and httpx.post(f"http://[::1]:{port}/check_correctness", json={}).status_code == 400


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(ConfigError, match="give an address of this machine"):
        check_port("tcp://[2001:db8::1]:0", "hub.bind")


@pytest.mark.parametrize(("upper", "lower", "then"), [
    ("", "", "10.0.0.7,127.0.0.1,localhost,::1"), ("a.org, b.org", "", "a.org,b.org,10.0.0.7,127.0.0.1,localhost,::1"),
    ("", "a.org,localhost", "a.org,localhost,10.0.0.7,127.0.0.1,::1"), ("*", "*", "*"),
])
def test_hosts_that_no_proxy_is_asked_for_stay_so(upper, lower, then, monkeypatch):
    monkeypatch.setenv("NO_PROXY", upper)
    monkeypatch.setenv("no_proxy", lower)
    reach_directly("http://10.0.0.7:80")
    reach_directly("http://10.0.0.7:81")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == then
