"""Which weights exist on this history, and how many batches each has seen."""

from __future__ import annotations

import pytest

from learner.hub.ledger.versions import MAX_ENDS, Versions, cut_lineage
from streamrl.messages import Lineage, VersionRef


def test_only_versions_of_the_surviving_history_are_known():
    versions = Versions(3, 7, [Lineage(1, 0, 4), Lineage(2, 4, 7), Lineage(9, 5, 4)], 7)
    versions.published(VersionRef(3, 8))

    known = {(epoch, version) for epoch in range(1, 10) for version in range(12) if versions.known(epoch, version)}

    assert known == {(1, v) for v in range(5)} | {(2, v) for v in range(4, 8)} | {(3, 7), (3, 8)}
    assert versions.lineage[-1] == Lineage(3, 7, 8)


def test_resuming_cuts_every_epoch_to_the_checkpoint():
    assert cut_lineage([Lineage(1, 0, 9), Lineage(2, 8, 12)], 6) == (Lineage(1, 0, 6), Lineage(2, 8, 6))


def test_versions_that_were_never_published_count_all_the_same():
    versions = Versions(1, 0, [], 0)
    for _ in range(7):
        versions.advance(versions.current + 1)
        if versions.current in (3, 6):
            versions.published(versions.ref)

    assert [versions.batches_at(v) for v in (0, 3, 6)] == [0, 3, 6]
    assert versions.oldest_useful(2) == VersionRef(1, 5)  # in optimizer steps, published or not


def test_versions_only_go_up():
    versions = Versions(2, 5, [], 5)
    for ref in (VersionRef(2, 4), VersionRef(1, 9)):
        with pytest.raises(ValueError, match="versions only go up"):
            versions.published(ref)


@pytest.mark.parametrize("steps", [1, 3])
def test_batches_are_counted_by_whole_batches(steps):
    versions = Versions(1, 0, [], 0)
    for _ in range(MAX_ENDS + 50):
        versions.advance(versions.current + steps)

    newest = versions.current
    recent = range(newest - steps * MAX_ENDS, newest + 1)
    assert [versions.batches_at(v) for v in recent] == [v // steps for v in recent]
    assert all(versions.batches_at(v) <= v // steps for v in range(newest + 1))  # never too high, however old


def test_a_batch_whose_steps_were_partly_skipped_still_counts_as_one():
    versions = Versions(1, 0, [], 0)
    versions.advance(4)
    versions.advance(7)  # one of four steps was skipped

    assert [versions.batches_at(v) for v in (3, 4, 6, 7)] == [0, 1, 1, 2]


def test_the_oldest_useful_version_is_named_in_the_epoch_that_made_it():
    versions = Versions(2, 6, [Lineage(1, 0, 6)], 6)

    assert versions.oldest_useful(2) == VersionRef(1, 4)
    assert versions.oldest_useful(100) == VersionRef(1, 0)
    assert Versions(1, 3, [], 3).oldest_useful(1) == VersionRef(1, 3)
