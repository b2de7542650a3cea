"""A sandbox that isolates nothing is told: once a run on the terminal, in the summary and in the report."""

from collections import Counter
from types import SimpleNamespace

import pytest

from actors.runtime import environment_calls
from envs.sandbox import SandboxPool
from envs.sandbox.pool import LEVELS_IN_USE
from streamrl.messages import SANDBOX_LEVEL, ActorHeartbeat, ActorState, HubHeartbeat
from streamrl.metrics.summary import WEAK_SANDBOX, summarize, warnings_of
from streamrl.report.headline import bookkeeping
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model


def beat(number: int, level: float) -> ActorHeartbeat:
    return ActorHeartbeat(
        incarnation=11, beat=number, state=ActorState.RUNNING, free=0, running=0, installed=None, tokens_total=0,
        stuck=(), outbox_groups=0, outbox_bytes=0, max_leases=4, stats={SANDBOX_LEVEL: level},
    )


@pytest.mark.timeout(60)
def test_the_first_actor_without_isolation_is_named_once_a_run(tmp_path):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, tiny_model(tmp_path))
        peers = [hub.connect(), hub.connect()]
        for number, peer in enumerate(peers):
            peer.join(f"a{number}")
        for number, level in enumerate((0.0, 2.0, 1.0, 1.0, 2.0)):
            for peer in peers:
                peer.send(beat(number, level))
                peer.receive(HubHeartbeat)
        notices = hub.server.context.notices

        assert [WEAK_SANDBOX in text for text in notices] == [True] and "a0" in notices[0]
        metrics = [one.metrics() for one in hub.server.context.observers]
        assert [one["sandbox_level"] for one in metrics if "sandbox_level" in one] == [1.0]


class FakeExecutor:
    num_answered, num_hung_calls = Counter(), 0

    def slow(self, _longer_than_s: float) -> tuple[int, float]:
        return 0, 0.0


def test_an_actor_tells_the_lowest_level_that_it_used():
    LEVELS_IN_USE.clear()
    runtime = SimpleNamespace(runners=(SimpleNamespace(executor=FakeExecutor()),))
    assert environment_calls(runtime)[SANDBOX_LEVEL] == 0
    SandboxPool("1", num_workers=1).close()
    assert environment_calls(runtime)[SANDBOX_LEVEL] == 1


@pytest.mark.parametrize(
    ("level", "warned", "shown"), [(0.0, [], []), (2.0, [], ["level 2"]), (1.0, [WEAK_SANDBOX], ["level 1"])]
)
def test_summary_and_report_tell_the_level(level, warned, shown):
    rows = [{"step": 1, "hub/sandbox_level": 0.0}, {"step": 2, "hub/sandbox_level": level}]
    summary = summarize(rows, run_id="r", max_lag_bound=2, device="cpu", dtype="float32", seed=0)

    assert warnings_of(rows) == list(summary.warnings) == warned
    for facts in (summary.headline(), bookkeeping(summary)):
        assert [value for name, value in facts if name == "sandbox"] == shown
