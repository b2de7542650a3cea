"""Evaluations of several sets, and those whose every answer is made by one version."""

import msgspec
import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.evals import EvalSource
from streamrl.messages import EvalResult, Lease, Purpose, Sampling, Turn, VersionRef
from tests.unit.hub.factories import FakeActor, ledger_arguments, publish, settings

KEEP_S = 50.0


def make_ledger(keep_s: float = KEEP_S) -> Ledger:
    """Two sets of prompts; with `keep_s` of 0 no version is pinned."""
    sources = {
        name: EvalSource(lambda index, name=name: f'{{"{name}": {index}}}'.encode(), Sampling(temperature=temperature))
        for name, temperature in (("", 0.0), ("hard", 0.5))
    }
    ledger = Ledger(settings(eval_keep_s=keep_s), **ledger_arguments(eval_sources=sources))  # type: ignore[arg-type]
    publish(ledger, VersionRef(1, 0))
    return ledger


def actors(ledger: Ledger, *names: str, now: float = 0.0) -> list[FakeActor]:
    found = [FakeActor(ledger, name) for name in names]
    for one in found:
        one.join(now)
    return found


def evals_of(actor: FakeActor, num: int = 1, now: float = 0.0) -> list[Lease]:
    """At most so many evaluation leases."""
    return [lease for lease in actor.ask(now, free_eval=num) if lease.purpose == Purpose.EVAL]


def result_of(ledger: Ledger, eval_id: int = 1) -> EvalResult:
    run = ledger.evals.get(eval_id)
    assert run is not None and run.done, run and run.progress()
    return run.result()


def test_each_set_has_its_own_records_sampling_and_result():
    ledger = make_ledger()
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 1)
    ledger.evals.request(2, 0, 2, dataset="hard")
    leases = evals_of(actor, 4)

    assert [(lease.dataset, lease.prompt, lease.sampling.temperature) for lease in leases] == [
        ("", b'{"": 0}', 0.0), ("hard", b'{"hard": 0}', 0.5), ("hard", b'{"hard": 1}', 0.5)
    ]
    for lease, reward in zip(leases, (1.0, 0.0, 0.5), strict=True):
        actor.finish(lease, rewards=[reward])
    own, hard = result_of(ledger, 1), result_of(ledger, 2)
    assert (own.dataset, own.score, own.num_prompts) == ("", 1.0, 1)
    assert (hard.dataset, hard.score, hard.num_prompts) == ("hard", 0.25, 2)


def test_the_final_answers_come_back_beside_the_scores():
    ledger = make_ledger()
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 2, num_responses=2)
    for lease, answer in zip(evals_of(actor, 4), ("7", "8", "9", "9"), strict=True):
        actor.finish(lease, answers=(answer,))
    assert result_of(ledger).prompt_answers == (("7", "8"), ("9", "9"))


def test_the_turns_of_answers_are_counted():
    ledger = make_ledger()
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 2)
    first, second = evals_of(actor, 2)
    actor.finish(first)
    group = actor.group(second)
    member = msgspec.structs.replace(group.members[0], turns=(Turn(0, 1, 0.5), Turn(1, 2, 0.5)), reward=1.0)
    assert actor.send(msgspec.structs.replace(group, members=(member,))).kind == "accepted"
    assert result_of(ledger).mean_turns == 1.5


@pytest.mark.shows("eval.pin")
@pytest.mark.parametrize("pinned", [True, False])
def test_only_a_pinned_evaluation_is_answered_by_one_version(pinned):
    ledger = make_ledger(KEEP_S if pinned else 0.0)
    fast, slow = actors(ledger, "fast", "slow")
    ledger.evals.request(1, 0, 3)
    first, second = evals_of(slow), evals_of(fast)
    assert {lease.keep_s for lease in first + second} == {KEEP_S if pinned else 0.0}
    publish(ledger, VersionRef(1, 1))
    slow.finish(first[0])
    fast.finish(second[0])
    fast.install(1)

    third = evals_of(fast)  # with the newer version
    assert len(third) == (0 if pinned else 1)
    if not pinned:
        fast.finish(third[0])
    for lease in evals_of(slow):
        slow.finish(lease)
    result = result_of(ledger)
    assert (result.version, result.num_prompts) == (0, 3)
    assert result.versions == ((0, 0) if pinned else (0, 1))


def test_a_lease_says_how_many_prompts_of_all_sets_wait_for_the_same_version():
    ledger = make_ledger()
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 2)
    ledger.evals.request(2, 0, 1, dataset="hard")
    ledger.evals.request(3, 5, 4)  # of a version to come
    assert [lease.num_after for lease in evals_of(actor, 4)] == [2, 1, 0]


@pytest.mark.parametrize("pinned", [True, False])
def test_an_answer_with_a_token_of_another_version_counts_only_without_a_pin(pinned):
    ledger = make_ledger(KEEP_S if pinned else 0.0)
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 1)
    publish(ledger, VersionRef(1, 1))
    (lease,) = evals_of(actor)
    actor.finish(lease, versions=[(1, 0), (1, 1)], rewards=[1.0])

    assert ledger.evals.get(1).done is not pinned
    assert ledger.counters()["num_eval_discarded"] == pinned
    if pinned:
        (again,) = evals_of(actor)
        actor.finish(again, rewards=[0.0])
        assert result_of(ledger).score == 0.0


def test_another_actor_with_the_version_takes_over_from_one_that_dies():
    ledger = make_ledger()
    dying, other = actors(ledger, "dying", "other")
    ledger.evals.request(1, 0, 2)
    (lost,), (held,) = evals_of(dying), evals_of(other)
    publish(ledger, VersionRef(1, 1))
    ledger.evict("dying", 1.0)
    ledger.tick(1.0)

    other.finish(held, 1.0)
    (again,) = evals_of(other, now=1.0)
    assert again.group_id == lost.group_id
    other.finish(again, 1.0)
    assert result_of(ledger).versions == (0, 0)
    assert ledger.counters()["num_evals_started_again"] == 0


def test_an_evaluation_whose_version_is_lost_starts_again_as_a_whole_with_a_newer_one():
    ledger = make_ledger()
    dying, newer = actors(ledger, "dying", "newer")
    ledger.evals.request(1, 0, 2)
    done, left = evals_of(dying, 2)
    dying.finish(done, rewards=[1.0])
    late = dying.group(left)
    publish(ledger, VersionRef(1, 1))
    newer.install(1)
    assert evals_of(newer) == []
    ledger.evict("dying", 1.0)
    ledger.tick(1.0)

    for lease in evals_of(newer, 2, 1.0):
        assert lease.min_version == VersionRef(1, 1)
        newer.finish(lease, 1.0, rewards=[0.0])
    result = result_of(ledger)
    assert (result.version, result.versions, result.score, result.num_prompts) == (1, (1, 1), 0.0, 2)
    assert ledger.counters()["num_evals_started_again"] == 1
    dying.join(2.0)
    assert dying.send(late, 2.0).kind == "rejected", "an answer of the lost version came after the end"


def test_answers_that_are_discarded_again_and_again_do_not_give_a_prompt_up():
    ledger = make_ledger()
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 1)
    publish(ledger, VersionRef(1, 1))
    for _ in range(5):  # an actor that installs while it answers
        (lease,) = evals_of(actor)
        actor.finish(lease, versions=[(1, 0), (1, 1)], rewards=[1.0])
    (lease,) = evals_of(actor)
    actor.finish(lease, rewards=[0.5])
    assert (result_of(ledger).score, result_of(ledger).num_prompts) == (0.5, 1)


def test_an_evaluation_that_started_again_has_all_its_time_for_the_next_version():
    ledger = make_ledger(KEEP_S)
    dying, newer = actors(ledger, "dying", "newer")
    ledger.evals.request(1, 0, 1)
    evals_of(dying)
    publish(ledger, VersionRef(1, 1))
    newer.install(1)
    ledger.tick(0.0)
    ledger.evict("dying", 1.0)
    ledger.tick(1.0)
    (lease,) = evals_of(newer, now=1.0)
    newer.beat(KEEP_S + 1.0)
    ledger.tick(KEEP_S + 1.0)
    newer.finish(lease, KEEP_S + 1.0, rewards=[1.0])
    assert (result_of(ledger).version, result_of(ledger).num_prompts) == (1, 1)


def test_an_actor_that_moved_on_gives_its_leases_back_to_the_evaluation():
    ledger = make_ledger()
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 1)
    (lease,) = evals_of(actor)
    publish(ledger, VersionRef(1, 1))
    actor.install(1)
    (revoked,) = ledger.tick(1.0)

    assert (revoked.kind, revoked.leases) == ("revoke", (lease.ref,))
    actor.revoke(revoked.leases)
    (again,) = evals_of(actor, now=1.0)
    actor.finish(again, 1.0)
    assert result_of(ledger).version == 1


@pytest.mark.shows("eval.pin_s")
@pytest.mark.parametrize("keep_s", [KEEP_S, 2 * KEEP_S])
def test_an_evaluation_that_delays_a_newer_version_for_too_long_ends_with_what_it_has(keep_s):
    ledger = make_ledger(keep_s)
    (actor,) = actors(ledger, "a")
    ledger.evals.request(1, 0, 3)
    done, stuck = evals_of(actor, 2)
    actor.finish(done, rewards=[1.0])
    actor.beat(500.0)
    ledger.tick(500.0)
    assert not ledger.evals.get(1).done, "nothing newer waits: it may take its time"

    publish(ledger, VersionRef(1, 1))
    ledger.tick(501.0)
    for now in (501.0 + keep_s - 1, 501.0 + keep_s):
        assert not ledger.evals.get(1).done
        actor.beat(now)
        effects = ledger.tick(now)
    assert [effect.leases for effect in effects] == [(stuck.ref,)]
    result = result_of(ledger)
    assert (result.num_prompts, result.num_unanswered, result.score) == (1, 2, 1.0)
    assert not actor.finish(stuck, 600.0).strike
