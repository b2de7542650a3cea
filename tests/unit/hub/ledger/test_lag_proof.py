"""The proof of the hard check on age: it finds a trajectory that is too old, and how often it reads whole groups."""

import msgspec
import pytest

from learner.hub.ledger.cut import FRAMES_EVERY, LagProof
from streamrl.messages.codec import Decoder
from tests.unit.hub.factories import FakeActor, joined, make_ledger, train


def trained_too_old(mode: str) -> float:
    """Violations counted in a batch whose group is three versions old under a bound of one, with L2 switched off."""
    ledger = make_ledger(groups_per_batch=1, eta=1, window=4, max_lag=1, mode=mode)
    ledger.lag.is_stale = lambda record, version, members=None: False  # type: ignore[method-assign]
    actor, other = joined(ledger, "a1", slots=1), joined(ledger, "a2", slots=8)
    (first,) = actor.ask()
    for version in range(3):
        other.install(version)
        other.finish(other.ask()[0])
        train(ledger)
    actor.finish(first, versions=[(1, 0), (1, 1)])

    assert train(ledger) == [0]
    return ledger.counters()["num_lag_violations"]


@pytest.mark.parametrize("mode", ["drop", "mask_old_tokens"])
@pytest.mark.parametrize("frames_every", [1, 1000])
def test_a_group_that_is_too_old_is_counted_from_its_frames_and_from_what_was_noted(monkeypatch, mode, frames_every):
    monkeypatch.setattr(LagProof, "frames_every", frames_every)

    assert trained_too_old(mode) == 2.0  # both members


def test_frames_are_believed_more_than_what_was_noted():
    ledger = make_ledger(groups_per_batch=1, eta=1, window=2, max_lag=1)
    actor = joined(ledger, "a1", slots=8)
    for version in range(2):
        actor.install(version)
        actor.finish(actor.ask()[0])
        train(ledger)
    lease = next(iter(actor.leases.values()), None) or actor.ask()[0]
    actor.finish(lease)
    (record,) = [one for one in ledger.groups.in_order() if one.members]
    young = [msgspec.structs.replace(one, version=2) for one in record.members[0].spans]
    record.members = {at: msgspec.structs.replace(one, spans=tuple(young)) for at, one in record.members.items()}
    frames = [ledger.lag.held(record, 4)]

    assert LagProof(1, False).num_violations([(record, frames[0])]) == 2


def test_every_sixteenth_batch_is_read_from_its_frames(monkeypatch):
    monkeypatch.setattr(LagProof, "frames_every", FRAMES_EVERY)
    ledger = make_ledger(groups_per_batch=1, eta=0, window=0, max_lag=0)
    actor, decoded = FakeActor(ledger, "a1"), []
    actor.join()
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, frame: decoded.append(version) or decode(self, frame))

    for version in range(2 * FRAMES_EVERY + 1):
        actor.install(version)
        actor.finish(actor.ask()[0])
        train(ledger)

    assert decoded == [0, FRAMES_EVERY, 2 * FRAMES_EVERY]
