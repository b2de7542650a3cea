"""Actors while the hub ends: each is told so, because no process would answer it later."""

from learner.hub import server as hub_server
from learner.hub.server import HubServer
from streamrl.messages import ActorHeartbeat, ActorState, Bye, Stop, StopReason
from tests.unit.config.setting_harness import LiveHub, config_of


def test_a_hello_that_comes_after_the_others_were_stopped_is_answered(tmp_path, monkeypatch):
    stop_the_others = HubServer._learner_gone

    def and_one_comes_late(server: HubServer) -> None:
        stop_the_others(server)
        peer.hello("late")
        assert server._actor_socket.poll(10_000)

    monkeypatch.setattr(HubServer, "_learner_gone", and_one_comes_late)
    with LiveHub(tmp_path, config_of()) as hub:
        peer = hub.connect()
        peer.send(Bye(1, "the connection is made"))
        assert peer.receive(Stop).reason == StopReason.NO_LINK
        hub._gone.set()
        hub._thread.join(timeout=20)
        stop = peer.receive(Stop)
        assert (stop.reason, stop.rejoin) == (StopReason.RESTARTING, True)


def test_the_hub_of_a_finished_run_ends_when_its_actors_have_left(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(hub_server, "GOODBYE_S", 1e6)
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, model_dir)
        peers = [hub.connect() for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.join(f"a{number}")
        hub.link.shutdown("the run is finished", finished=True)
        for peer in peers:
            assert peer.receive(Stop).reason == StopReason.FINISHED
        for beat in range(2):  # as of one that its stop did not reach
            peers[0].send(ActorHeartbeat(11, beat, ActorState.RUNNING, 4, 0, None, 0, (), 0, 0, 0))
            assert peers[0].receive(Stop).reason == StopReason.FINISHED

        for peer in peers:
            assert hub._thread.is_alive()
            peer.close()
        hub._thread.join(timeout=20)
        assert not hub._thread.is_alive()


def test_it_does_not_wait_forever_for_one_that_stays(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(hub_server, "GOODBYE_S", 0.1)
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, model_dir)
        peer = hub.connect()
        peer.join()
        hub.link.shutdown("the run is finished", finished=True)
        hub._thread.join(timeout=20)
        assert not hub._thread.is_alive() and peer.receive(Stop).reason == StopReason.FINISHED
