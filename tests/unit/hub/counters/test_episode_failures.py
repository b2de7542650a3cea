"""Episodes that fail: the first is reported, a rising share is an alarm, nothing else ends the run."""

import json
import time

import msgspec
import pytest

from learner.hub import server
from learner.hub.observers.counters import NUM_FIRST, Arrival, EpisodeFailures
from streamrl.errors import TaskError
from streamrl.messages import (
    EVAL_BIT,
    NUM_FAILED_EPISODES,
    ActorHeartbeat,
    ActorState,
    Group,
    Installed,
    Leases,
    Manifest,
    MemberStatus,
    Outcome,
    Purpose,
    ReturnReason,
    Sampling,
)
from streamrl.run_dirs import LAUNCH_NOTE
from tests.unit.config.setting_harness import LiveHub, Peer, config_of
from tests.unit.hub.factories import FakeActor, member, one_actor

CAUSE = "task broken: ValueError: no answer"


def group(num_good: int, num_failed: int, detail: str = CAUSE) -> Group:
    """A group message with so many members that came through and that failed."""
    stats = {NUM_FAILED_EPISODES: float(num_failed)}
    if not num_good:
        return Group(0, 0, 0, 0, Outcome.RETURNED, ReturnReason.ENV_ERROR, detail, Sampling(), (), stats)
    members = [member(i, [(1, 0)]) for i in range(num_good)]
    members += [member(i, [(1, 0)], status=MemberStatus.ABORTED) for i in range(num_failed)]
    detail = detail if num_failed else ""
    return Group(0, 0, 0, 0, Outcome.COMPLETE, ReturnReason.NONE, detail, Sampling(), tuple(members), stats)


def told(*groups: Group) -> tuple[list[str], EpisodeFailures]:
    said: list[str] = []
    failures = EpisodeFailures(said.append)
    for one in groups:
        failures.group(Arrival("a", one))
    return said, failures


def test_the_first_failure_is_told_once_with_its_cause():
    said, failures = told(group(4, 0), group(3, 1), group(3, 1, "task broken: another"))

    assert said == [f"an episode failed: {CAUSE}"]
    assert (failures.first, failures.last) == (CAUSE, "task broken: another")


def test_a_run_in_which_every_episode_fails_must_stop_with_the_cause():
    said, failures = told(*[group(0, 4)] * (NUM_FIRST // 4 - 1))
    assert not failures.fatal

    said, failures = told(*[group(0, 4)] * (NUM_FIRST // 4))
    assert failures.fatal == said[-1] == f"all of the first {NUM_FIRST} episodes failed, so the run stops: {CAUSE}"


@pytest.mark.parametrize("num_answered", [0, 1, 200])
@pytest.mark.parametrize(("reason", "num_failed", "what"), [
    (ReturnReason.ENV_ERROR, 8, f"{NUM_FIRST} training episodes failed"),
    (ReturnReason.TOO_LONG, 0, f"{NUM_FIRST} training prompts came back"),
])
def test_an_evaluation_that_came_through_excuses_no_training(reason, num_failed, what, num_answered):
    answered = msgspec.structs.replace(group(1, 0), group_id=EVAL_BIT)
    stats = {NUM_FAILED_EPISODES: float(num_failed)}
    back = Group(0, 0, 0, 0, Outcome.RETURNED, reason, CAUSE, Sampling(), (), stats)
    num = NUM_FIRST // max(1, num_failed)

    _, failures = told(*[answered] * num_answered, *[back] * num)

    expected = what if num_answered else what.replace("training ", "")
    assert failures.fatal == f"all of the first {expected}, so the run stops: {CAUSE}"
    assert not told(*[answered] * num_answered, *[back] * (num - 1), group(1, 0), back)[1].fatal


def test_an_evaluation_stops_no_run_whose_training_came_through():
    failed = msgspec.structs.replace(group(0, 1), group_id=EVAL_BIT)

    assert not told(group(1, 0), *[failed] * 2 * NUM_FIRST)[1].fatal
    assert told(*[failed] * NUM_FIRST)[1].fatal


def test_a_single_episode_that_came_through_keeps_the_run_going():
    assert not told(group(1, 3), *[group(0, 4)] * 20)[1].fatal


def too_long(detail: str = "the prompt has 99 tokens") -> Group:
    return Group(0, 0, 0, 0, Outcome.RETURNED, ReturnReason.TOO_LONG, detail, Sampling(), (), {})


def test_a_prompt_that_is_too_long_ends_the_run_only_if_asked_for():
    said, failures = told(group(4, 0), *[too_long()] * 2 * NUM_FIRST)
    assert not failures.fatal

    strict = EpisodeFailures(said.append, stop_at_long_prompt=True)
    strict.group(Arrival("a", group(4, 0)))
    strict.group(Arrival("a", too_long()))
    assert strict.fatal == "data.prompt_overflow=error, so the run stops: the prompt has 99 tokens"


def test_a_rising_share_of_failures_is_a_warning_and_a_second_one_only_after_it_has_fallen():
    good, half = [group(4, 0)], [group(2, 2)]

    assert len(told(*good * 50, *half * 20)[0]) == 1  # 40 of 200: the first failure alone
    said, _ = told(*good * 50, *half * 60)
    assert len(said) == 2 and said[1].endswith(f"% of the last 200 episodes failed: {CAUSE}")
    assert len(told(*good * 50, *half * 60, *good * 50, *half * 60)[0]) == 3


def test_the_first_lease_that_comes_back_for_each_other_reason_is_told():
    def back(reason: ReturnReason, detail: str) -> Group:
        return Group(0, 0, 0, 0, Outcome.RETURNED, reason, detail, Sampling(), (), {})

    long = back(ReturnReason.TOO_LONG, "the prompt has 99 tokens")
    said, failures = told(long, long, back(ReturnReason.ENGINE_ERROR, "hung"), back(ReturnReason.DRAIN, "leaving"))

    assert said == ["a lease came back (too_long): the prompt has 99 tokens", "a lease came back (engine_error): hung"]
    assert failures.last == "hung" and not failures.first


@pytest.mark.parametrize("number", [float("nan"), -3.0, float("-inf")])
def test_an_impossible_count_of_an_actor_is_0(number):
    assert msgspec.structs.replace(group(0, 1), stats={NUM_FAILED_EPISODES: number}).num_failed_episodes == 0


def test_leases_that_come_back_for_a_failure_are_counted_apart_from_those_of_lost_actors():
    ledger, actor, (lease,) = one_actor(groups_per_batch=1, eta=0, max_attempts=3)
    broken = actor.group(lease, members=(), outcome=Outcome.RETURNED, reason=ReturnReason.ENV_ERROR)
    actor.send(msgspec.structs.replace(broken, stats={NUM_FAILED_EPISODES: 2.0}))
    (again,) = actor.ask()
    actor.hand_back(again, ReturnReason.DRAIN)
    actor.ask()

    counts = ledger.counters()
    assert [counts[f"num_{name}"] for name in ("leases_reissued", "leases_retried", "episodes_failed")] == [2, 1, 2]


# --- through a real hub ----------------------------------------------------------------------------------------------


def fail_everything(hub: LiveHub, peer: Peer, manifest: Manifest, num_groups: int, purpose: Purpose) -> None:
    """An actor in whose environment every episode fails."""
    peer.join()
    peer.send(Installed(manifest.ref, manifest.root, True, 1, 0.0, 0.0, 0.0, 0.0, 0, ""))
    actor = FakeActor(hub.server.context.ledger, "a1", ref=manifest.ref)
    # One lease at a time: how many more are under way when the last failure arrives decides whether the run stops.
    beat = ActorHeartbeat(11, 1, ActorState.RUNNING, 1, 0, manifest.ref, 0, (), 0, 0, 4, {}, 1, manifest.root)
    done = 0
    while done < num_groups:
        peer.send(beat)
        for lease in peer.receive(Leases).grants:
            if lease.purpose == purpose:
                failed = actor.group(lease, members=(), outcome=Outcome.RETURNED, reason=ReturnReason.ENV_ERROR)
                stats = {NUM_FAILED_EPISODES: float(len(lease.members))}
                peer.send(msgspec.structs.replace(failed, detail=CAUSE, stats=stats))
                done += 1


def test_the_learner_stops_with_the_cause_and_launch_can_read_it(tmp_path, model_dir):
    with LiveHub(tmp_path, config_of("rollout.num_responses_per_prompt=8"), vocab_size=100) as hub:
        manifest = hub.publish(0, model_dir)
        peer = hub.connect()  # its name keeps it: what a collected socket has not sent yet is lost
        fail_everything(hub, peer, manifest, NUM_FIRST // 8, Purpose.TRAIN)
        with pytest.raises(TaskError, match=f"all of the first {NUM_FIRST} episodes failed.*{CAUSE}"):
            hub.link.next_batch(0)
        assert hub.link.status.first_failure == CAUSE
        deadline = time.monotonic() + 10
        while len(notices := json.loads((tmp_path / "status.json").read_text())["notices"]) < 2:  # one after the other
            assert time.monotonic() < deadline

    assert notices[0][9:] == f"an episode failed: {CAUSE}" and "the run stops" in notices[1]


def test_an_evaluation_without_a_score_names_the_cause(tmp_path, model_dir):
    with LiveHub(tmp_path, config_of("hub.num_max_attempts=1"), vocab_size=100) as hub:
        manifest = hub.publish(0, model_dir)
        hub.link.evaluate(0, 0, 2)
        peer = hub.connect()
        fail_everything(hub, peer, manifest, 2, Purpose.EVAL)
        hub.link.wait_for_evals()

    (result,) = hub.link.evals
    assert (result.num_prompts, result.failure) == (0, CAUSE)


def test_without_an_actor_the_hub_says_how_to_start_one(tmp_path, model_dir, monkeypatch, caplog):
    monkeypatch.setattr(server, "NO_ACTOR_S", 0.0)
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, model_dir)
        deadline = time.monotonic() + 20
        while len(hub.server.context.notices) < 2:  # it says so again
            assert time.monotonic() < deadline
            time.sleep(0.01)

        assert caplog.text.count("no actor is connected, for ") >= 2
        assert f"streamrl actor connect={hub.server.endpoint}" in caplog.text


def test_without_an_actor_a_hub_that_launch_started_says_how_many_load(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(server, "NO_ACTOR_S", 0.0)
    (tmp_path / LAUNCH_NOTE).write_text('{"actors": 2}')
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, model_dir)
        deadline = time.monotonic() + 20
        while not hub.server.context.notices:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (notice, *_) = map(str, hub.server.context.notices)
    assert "2 started with the run and may still load, see logs/actor-*.log" in notice


def test_prompts_that_no_actor_can_take_stop_the_run_with_the_reason():
    long = "the prompt has 70 tokens, rollout.max_prompt_tokens is 32"
    back = msgspec.structs.replace(group(0, 1), reason=ReturnReason.TOO_LONG, detail=long, stats={})
    said, failures = told(*[back] * NUM_FIRST)

    assert failures.fatal == f"all of the first {NUM_FIRST} prompts came back, so the run stops: {long}"
    assert said == [f"a lease came back (too_long): {long}", failures.fatal]
    assert told(group(1, 0), *[back] * NUM_FIRST)[1].fatal == ""


@pytest.mark.parametrize(("num_failing", "stops"), [(100, False), (201, True)])
def test_the_first_to_fail_of_many_that_began_at_once_stop_no_run(num_failing, stops):
    failures = EpisodeFailures(lambda text: None)
    long = msgspec.structs.replace(group(0, 1), reason=ReturnReason.TOO_LONG, detail="too long", stats={})
    for _ in range(num_failing):
        failures.group(Arrival("a", group(0, 4), num_open=100))
    prompts = EpisodeFailures(lambda text: None)
    for _ in range(num_failing):
        prompts.group(Arrival("a", long, num_open=100))

    assert bool(failures.fatal) == bool(prompts.fatal) == stops
