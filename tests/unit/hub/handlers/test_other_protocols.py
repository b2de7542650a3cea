"""Two releases that do not speak the same protocol: refused with a reason, never misread."""

import asyncio

import msgspec
import pytest
import zmq

from streamrl.messages import Bye, Hello, HubHeartbeat, Stop, StopReason, VersionRef
from streamrl.messages.codec import PREAMBLE, encode, protocol_of
from streamrl.transport.client import HubClient
from streamrl.transport.session import ActorSession, LinkClosed
from streamrl.transport.sockets import actor_dealer
from tests.unit.config.setting_harness import LiveHub, config_of


def test_the_hub_answers_an_unregistered_peer_in_that_peers_protocol_with_the_remedy(tmp_path):
    with LiveHub(tmp_path, config_of()) as hub:
        socket = actor_dealer(hub.context, hub.server.endpoint)
        frame = encode(Bye(1, "a message of the future"), protocol=7)
        socket.send(frame)
        assert socket.poll(20_000)
        answer = socket.recv()
        socket.close(linger=0)

        stop = msgspec.msgpack.decode(answer[PREAMBLE.size :], type=Stop)
        assert protocol_of(answer) == 7 and stop.reason == StopReason.PROTOCOL
        assert (stop.exit_code, stop.rejoin) == (4, False)
        assert "speaks protocol 7, the hub 1" in stop.detail and "same release" in stop.detail
        assert hub.server.context.counters["num_wire_errors_protocol"] == 1


def test_a_peer_without_our_preamble_is_not_answered(tmp_path):
    with LiveHub(tmp_path, config_of()) as hub:
        socket = actor_dealer(hub.context, hub.server.endpoint)
        socket.send(b"GET / HTTP/1.1\r\n\r\n")
        peer = hub.connect()
        peer.send(Bye(1, "known protocol, unknown actor"))
        assert peer.receive(Stop).reason == StopReason.NO_LINK
        assert not socket.poll(0)
        socket.close(linger=0)


@pytest.mark.parametrize(
    ("changes", "reason", "exit_code"),
    [
        ({"protocol_min": 2, "protocol_max": 3}, StopReason.PROTOCOL, 4),
        ({"run_id": "other"}, StopReason.WRONG_RUN, 6),
    ],
    ids=["protocol", "run"],
)
def test_a_hello_of_another_release_or_run_is_refused_with_a_reason(tmp_path, changes, reason, exit_code):
    hello = Hello(
        protocol_min=1, protocol_max=1, actor_id="a1", incarnation=11, run_id=None, engine="test", software="test",
        max_leases=4, transports=("zmq",), installed=None, held=(), outbox=(), next_seq=1,
    )
    with LiveHub(tmp_path, config_of()) as hub:
        peer = hub.connect()
        peer.send(msgspec.structs.replace(hello, **changes))
        stop = peer.receive(Stop)

        assert (stop.reason, stop.exit_code, stop.rejoin) == (reason, exit_code, False) and stop.detail
        assert hub.server.context.ledger.counters()["num_actors"] == 0


def test_an_actor_whose_hub_speaks_another_protocol_ends_and_says_so():
    async def work() -> LinkClosed:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        link = ActorSession("a1", 77, engine="scripted", max_leases=4, transports=("zmq",), software="test")
        client = HubClient(f"tcp://127.0.0.1:{port}", link)
        client.start()
        try:
            assert await asyncio.to_thread(router.poll, 20_000)
            peer, _ = router.recv_multipart()
            router.send_multipart([peer, encode(HubHeartbeat(1, 1, 0, VersionRef(1, 0), ""), protocol=2)])
            while not isinstance(event := await client.events.get(), LinkClosed):
                pass
            return event
        finally:
            client.close()
            context.destroy(linger=0)

    gone = asyncio.run(asyncio.wait_for(work(), 30))

    assert gone.exit_code == 4 and "speaks protocol 2, this build 1" in gone.detail
