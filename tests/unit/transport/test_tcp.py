"""Connections of this process that try again soon: options of real sockets, as the kernel tells them."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from learner.hub_client import link
from learner.hub_client.link import HubLink
from learner.ranks.beats import RankBeats
from learner.ranks.mesh import Ranks
from streamrl.errors import StreamrlError
from streamrl.messages import RANK_TO_HUB, RankBeat
from streamrl.messages.codec import Decoder
from streamrl.transport.keys import RankKeys
from streamrl.transport.peers import RTO_MAX_MS, retry_soon
from tests.flow.processes import wait_until


def longest_wait_ms(one: socket.socket) -> int:
    try:
        return one.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS)
    except OSError:
        pytest.skip("this kernel is older than Linux 6.15")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection; neither was made by what changes them."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def test_every_connection_is_changed_once_and_others_are_left_alone(pair):
    assert retry_soon(0.0) == 0 and all(longest_wait_ms(one) == 120_000 for one in pair)
    with socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        assert retry_soon(30.0) >= 2
    assert [longest_wait_ms(one) for one in pair] == [3000, 3000]
    assert retry_soon(30.0) == 0
    assert retry_soon(0.5) >= 2, "a second is the least that the kernel takes"
    assert [longest_wait_ms(one) for one in pair] == [1000, 1000]
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x", "they were only looked at through copies"


def test_what_a_listening_socket_accepts_inherits_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        longest_wait_ms(server)
        retry_soon(30.0)
        with socket.create_connection(server.getsockname()), server.accept()[0] as accepted:
            assert longest_wait_ms(accepted) == 3000


@pytest.mark.parametrize("several_machines", [True, False])
def test_ranks_on_several_machines_change_the_connections_of_their_process(pair, several_machines):
    longest_wait_ms(pair[0])
    keys = RankKeys.new()
    context = zmq.Context()
    hub = context.socket(zmq.ROUTER)
    if several_machines:
        hub.curve_server, hub.curve_secretkey, hub.curve_publickey = True, keys.server.secret, keys.server.public
    port = hub.bind_to_random_port("tcp://127.0.0.1")
    with RankBeats(f"tcp://127.0.0.1:{port}", Ranks(), silent_s=20.0, key=keys.key if several_machines else None):
        assert hub.poll(20_000), "no beat"
        assert isinstance(Decoder(RANK_TO_HUB).decode(hub.recv_multipart()[-1]), RankBeat)
        if several_machines:
            wait_until(lambda: longest_wait_ms(pair[0]) == 2000, 20, "the option")
        else:
            assert longest_wait_ms(pair[0]) == 120_000
    context.destroy(linger=0)


def test_a_rank_waits_for_a_silent_hub_as_long_as_the_hub_for_a_rank(monkeypatch):
    monkeypatch.setattr(link, "HUB_SILENT_S", 0.0)
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
    options = dict(
        rank=1, world=2, version=0, check_hub=lambda: None, stop_requested=lambda: False, stall_report_s=60,
        stall_fail_s=0,
    )
    patient, other = HubLink(address, rank_silent_s=600.0, **options), HubLink(address, **options)
    try:
        assert patient._receive() is None
        with pytest.raises(StreamrlError, match="presumed dead"):
            other._receive()
    finally:
        for one in (patient, other):
            one._socket.setsockopt(zmq.LINGER, 0)
            one.close()
        context.destroy(linger=0)
