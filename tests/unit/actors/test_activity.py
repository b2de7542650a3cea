"""The line that an actor writes now and then of what it makes."""

from types import SimpleNamespace

from actors.activity import EVERY_S, Activity
from streamrl.messages import MemberStatus
from tests.unit.hub.factories import member


def group(*rewards, aborted=0, failed=0):
    spans = [(1, 0)]
    done = [member(i, spans, reward=reward) for i, reward in enumerate(rewards)]
    left = [member(90 + i, spans, reward=9.0, status=MemberStatus.ABORTED) for i in range(aborted)]
    return SimpleNamespace(members=(*done, *left), num_failed_episodes=failed)


def test_groups_tokens_and_rewards_are_those_since_the_line_before():
    activity = Activity(100.0)
    activity.add(group(1.0, 0.0))
    activity.add(group(0.5, 0.5, aborted=1))

    assert activity.line(100.0 + EVERY_S / 2, 50, "1:3") == "", "too early"
    assert activity.line(110.0, 500, "1:3") == "working: 2 groups, 50 tokens/s, mean reward 0.5 in 10 s, version 1:3"

    activity.add(group(1.0))
    assert activity.line(130.0, 700, "1:9") == "working: 1 groups, 10 tokens/s, mean reward 1 in 20 s, version 1:9"


def test_failures_are_told_and_an_idle_actor_says_nothing():
    activity = Activity(0.0)
    activity.add(group(aborted=4, failed=4))

    assert activity.line(10.0, 0, "1:0") == "working: 0 groups, 0 tokens/s, 4 episodes failed in 10 s, version 1:0"
    assert activity.line(20.0, 0, "1:0") == ""
