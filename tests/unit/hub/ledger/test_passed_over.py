"""Groups that are not trained on and kept to be read: filtered ones and stale ones, a bounded and fair draw."""

import pytest

from learner.hub.ledger.state import PassedOver
from learner.hub.ledger.tables.filters import zero_std
from streamrl.messages import Group, GroupOrigin
from streamrl.messages.actors import TO_HUB
from streamrl.messages.codec import Decoder
from streamrl.messages.seeding import draw_key
from tests.unit.hub.factories import joined, make_ledger, one_actor, train


def fates(ledger) -> dict[int, tuple[str, str, int]]:
    """What was kept since the last call: group -> fate, actor, prompt."""
    decoder, found = Decoder(TO_HUB), {}
    for one in ledger.passed_over.take():
        group = decoder.decode(one.frame)
        assert isinstance(group, Group)
        found[group.group_id] = (one.fate, one.origin.actor_id, one.origin.prompt_index)
    return found


def test_a_filtered_group_is_kept_with_its_reason_and_a_trained_one_is_not():
    ledger, actor, (first, second, *_) = one_actor(num_passed_over=4, keep_group=zero_std(), groups_per_batch=1, eta=1)

    actor.finish(first, rewards=[1.0] * len(first.members))
    actor.finish(second)
    assert train(ledger) == [second.group_id]

    assert fates(ledger) == {first.group_id: ("zero_std", "a1", first.prompt_index)}
    assert fates(ledger) == {}, "each is handed over once"


@pytest.mark.parametrize("on_stale", ["reissue", "drop"])
@pytest.mark.parametrize("when", ["on its way", "while it waits"])
def test_a_stale_group_is_kept(when, on_stale):
    ledger = make_ledger(groups_per_batch=1, eta=1, window=2, max_lag=1, on_stale=on_stale, num_passed_over=4)
    actor, other = joined(ledger, "a1", slots=1), joined(ledger, "a2", slots=8)
    (first,) = actor.ask()
    for version in range(2):  # two later groups overtake the first one
        other.install(version)
        other.finish(other.ask()[0])
        if version == 1 and when == "while it waits":
            ledger.cut_batch(1)
            actor.finish(first, versions=[(1, 0)])
            ledger.cut_batch(2)
        elif version == 1:
            train(ledger)
            actor.finish(first, versions=[(1, 0)])
        else:
            train(ledger)

    assert ledger.counters()["num_groups_stale"] == 1
    assert fates(ledger) == {first.group_id: ("stale", "a1", first.prompt_index)}


def test_the_groups_of_a_skipped_step_are_not_kept_twice():
    ledger, actor, leases = one_actor(num_passed_over=4, groups_per_batch=1)
    actor.finish(leases[0])
    train(ledger, skipped=True)

    assert fates(ledger) == {}


def test_few_are_kept_and_those_with_the_smallest_keys():
    kept, nothing = PassedOver(3, seed=5), PassedOver(0, seed=5)
    for group_id in range(40):
        for one in (kept, nothing):
            one.add(group_id, [b"%d" % group_id], [GroupOrigin("a", 0)], "stale")
    kept.add(99, [], [], "stale")  # nothing arrived of it

    frames = {int(one.frame) for one in kept.take()}
    assert frames == set(sorted(range(40), key=lambda one: draw_key(5, one))[:3]) and nothing.take() == ()
