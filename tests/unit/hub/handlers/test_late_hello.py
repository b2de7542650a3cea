"""An actor that asks to join while the hub ends is told so: no process would answer it later."""


from learner.hub.server import HubServer
from streamrl.messages import Bye, Stop, StopReason
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
