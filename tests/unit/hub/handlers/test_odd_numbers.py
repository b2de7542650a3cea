"""Numbers that no honest actor sends, in every field of every message: the hub goes on, and its own stay finite."""

import math

import msgspec
import pytest

from learner.hub.observers.counters import LARGEST, SUMS
from streamrl.messages import (
    ANSWERED_STEPS,
    FINISHED_AT,
    HUNG_CALLS,
    NUM_FAILED_EPISODES,
    SANDBOX_LEVEL,
    SLOW_CALLS,
    SLOWEST_CALL_S,
    TO_HUB,
    Bye,
    Group,
    Hello,
    HubHeartbeat,
    Installed,
    InstallSource,
    Probed,
)
from streamrl.stream.history import LoggedGroup
from streamrl.stream.records import GroupArrived
from tests.unit.config.setting_harness import LiveHub, config_of
from tests.unit.hub.handlers.test_control_requests import heartbeat, until
from tests.unit.messages.examples import example_of

ODD = (math.nan, math.inf, -math.inf, -1.0, 1.7e308, 1e-320)
STATS = (
    *SUMS, *LARGEST, SLOW_CALLS, SLOWEST_CALL_S, HUNG_CALLS, ANSWERED_STEPS, SANDBOX_LEVEL, "abandoned_threads",
    NUM_FAILED_EPISODES, FINISHED_AT,
)


def all_odd(value: object, number: float) -> object:
    """The same value with this number for every float, and every statistic that a hub knows in every dict."""
    if isinstance(value, float):
        return number
    if isinstance(value, dict):
        return dict.fromkeys(STATS, number)
    return [all_odd(one, number) for one in value] if isinstance(value, list | tuple) else value


@pytest.fixture
def hub(tmp_path, model_dir):
    with LiveHub(tmp_path, config_of("trainer.num_steps=7")) as hub:
        hub.manifest = hub.publish(0, model_dir)
        yield hub


def test_no_number_of_an_actor_ends_the_hub_or_stays_in_its_counters(hub):
    for kind in [one for one in TO_HUB.values() if one not in (Hello, Bye)]:
        for place, number in enumerate(ODD):
            name = f"{kind.__name__}-{place}"
            peer = hub.connect()
            peer.join(name)
            plain = all_odd(msgspec.to_builtins(example_of(kind), builtin_types=(bytes,)), number)
            odd = msgspec.convert(plain, kind, builtin_types=(bytes,))
            known = {"incarnation": 11, "ok": True} if hasattr(odd, "ok") else {"incarnation": 11}
            peer.send(msgspec.structs.replace(odd, **{key: known[key] for key in known if hasattr(odd, key)}))
            peer.send(heartbeat(hub))
            peer.receive(HubHeartbeat)
            assert hub._thread.is_alive(), name
            hub.link.refresh_status()
            strange = {key: one for key, one in hub.link.status.counters.items() if not 0.0 <= one < 1e300}
            assert not strange, name
            peer.close()


def test_an_actor_that_was_killed_is_in_no_metric_of_quarantine(hub):
    peer = hub.connect()
    peer.join("a1")
    probe = Probed(0.5, 0.9, "", 0.0)
    peer.send(Installed(
        hub.manifest.ref, hub.manifest.root, True, InstallSource.ZMQ, 0.0, 0.0, 0.0, 0.0, 0, "", probe
    ))
    until(lambda: hub.server.context.weights.health.metrics()["num_quarantined"] == 1, "its probe")

    peer.close()

    until(lambda: hub.server.context.weights.health.metrics()["num_quarantined"] == 0, "its end")


def test_a_clock_of_an_actor_that_tells_no_time_is_not_exported():
    group = example_of(Group)
    for number in (*ODD, 1e9):
        odd = msgspec.structs.replace(group, stats={FINISHED_AT: number})
        told = LoggedGroup(1, example_of(GroupArrived), odd, "trained", "", 0).finished_at
        assert told == number if number in (1e9, 1e-320) else told is None, number
