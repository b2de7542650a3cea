"""`streamrl status` and `streamrl drain` at a real hub, with real sockets for the learner and the actors."""

import json
import math
import time

import pytest
import zmq

from learner.ranks.beats import RankBeats
from learner.ranks.mesh import Ranks
from streamrl.errors import ControlError
from streamrl.messages import HUB_TO_RANK, ActorHeartbeat, ActorState, Drain, EndGroup, Leases, RankBeat, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.transport.control import ask
from tests.unit.config.setting_harness import LiveHub, Peer, config_of


@pytest.fixture
def hub(tmp_path, model_dir):
    with LiveHub(tmp_path, config_of("trainer.num_steps=7")) as hub:
        hub.manifest = hub.publish(0, model_dir)
        yield hub


def request(hub: LiveHub, **words):
    return ask(json.loads((hub.path / "hub.json").read_text()), "the hub", **words)


def told(hub: LiveHub) -> dict[str, str]:
    return dict(request(hub, verb="status")["processes"])


def until(condition, what: str):
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def serving(peer: Peer, hub: LiveHub, *, free: int) -> None:
    peer.send(heartbeat(hub, free=free))


def heartbeat(hub: LiveHub, **other) -> ActorHeartbeat:
    return ActorHeartbeat(**{
        "incarnation": 11, "beat": 1, "state": ActorState.RUNNING, "free": 0, "running": 0,
        "installed": VersionRef(1, 0), "tokens_total": 0, "stuck": (), "outbox_groups": 0, "outbox_bytes": 0,
        "max_leases": 4, "root": hub.manifest.root, **other,
    })


def test_every_process_says_what_it_does_or_waits_for(hub):
    first = request(hub, verb="status")
    assert (first["version"], first["total_steps"]) == (0, 7)
    assert dict(first["processes"])["hub"] == "waits for actors: none is connected"

    with RankBeats(hub.link_endpoint, Ranks(), silent_s=20.0):
        peer, idle = hub.connect(), hub.connect()
        peer.join("a2")
        idle.join("a10")
        assert told(hub)["a2"].startswith("loads its task and its engine")
        peer.send(heartbeat(hub, installed=None, stats={"up_s": 1.0}))
        until(lambda: told(hub)["a2"].startswith("waits for weights: it has no usable version yet"), "its engine")
        serving(peer, hub, free=1)
        peer.receive(Leases)
        serving(idle, hub, free=0)

        busy = until(lambda: (now := told(hub))["a10"].startswith("waits for itself") and now, "a10 is heard")
        assert busy["a2"].startswith("generates 1 group, the oldest for ") and "version 1:0" in busy["a2"]
        assert list(busy)[-2:] == ["a2", "a10"], "by number"
        assert until(lambda: told(hub)["learner"].startswith("is in set-up"), "a beat of the learner")


def test_an_actor_is_told_to_finish_and_leave(hub):
    peer = hub.connect()
    peer.join("a1")

    assert request(hub, verb="drain", actor="a1", within_s=7.0) == {"actor": "a1", "num_leases": 0}

    message = peer.receive(Drain)
    assert (message.reason, message.deadline_s) == ("streamrl drain", 7.0)


def test_words_of_a_request_that_are_nothing_of_their_kind_are_refused(hub):
    hub.connect().join("a1")
    for value in ([], {}, None, "soon", -1.0, math.nan, math.inf, 10**400):
        with pytest.raises(ControlError, match="within_s must be a number from 0 to 86400, not "):
            request(hub, verb="drain", actor="a1", within_s=value)
        with pytest.raises(ControlError, match="no actor .* is connected"):
            request(hub, verb="drain", actor=value)


def test_an_actor_that_is_not_there_is_an_error_that_names_those_that_are(hub):
    with pytest.raises(ControlError, match="no actor 'a1' is connected: no actor is"):
        request(hub, verb="drain", actor="a1")
    hub.connect().join("actor-0")

    with pytest.raises(ControlError, match=r"no actor 'actor0' is connected\. Did you mean actor-0\?"):
        request(hub, verb="drain", actor="actor0")
    with pytest.raises(ControlError, match="does not know 'pause'"):
        request(hub, verb="pause")


def test_an_actor_whose_process_has_ended_is_evicted_long_before_a_silent_one(tmp_path, model_dir):
    with LiveHub(tmp_path, config_of("hub.heartbeat_s=0.1", "hub.dead_after_s=600")) as hub:
        hub.publish(0, model_dir)
        dead, silent = hub.connect(), hub.connect()
        dead.join("dead")
        silent.join("silent")

        dead.close()  # as the kernel does for a process that is killed

        until(lambda: "dead" not in told(hub), "the eviction of the dead actor")
        assert "has been silent for" in until(
            lambda: (now := told(hub)["silent"]).startswith("has been silent") and now, "its silence is told"
        )
        assert hub.server.context.ledger.counters()["num_evictions"] == 1.0


@pytest.mark.shows("learner.rank_silent_s")
@pytest.mark.parametrize(("silent_s", "ends"), [(0.3, True), (600.0, False)])
def test_a_rank_without_a_heartbeat_ends_the_group_after_the_time_set(tmp_path, silent_s, ends):
    def sent(rank: int) -> None:
        ranks[rank].send(encode(RankBeat(rank, 2, 2**22 + rank, "another/1", "pack", 0.1)))

    with LiveHub(tmp_path, config_of(f"learner.rank_silent_s={silent_s}")) as hub:
        ranks = [hub.context.socket(zmq.DEALER) for _ in range(2)]
        for rank, one in enumerate(ranks):
            one.connect(hub.link_endpoint)
            sent(rank)
        for _ in range(20):  # rank 0 goes on, rank 1 was heard once
            sent(0)
            if ranks[0].poll(100):
                break
        told = [Decoder(HUB_TO_RANK).decode(ranks[0].recv())] if ranks[0].poll(0) else []

    lost = json.loads((tmp_path / "status.json").read_text())["lost"]
    assert [type(one) for one in told] == ([EndGroup] if ends else [])
    assert ("learner rank 1 (process 4194305 on another) has been silent for" in lost) is ends
