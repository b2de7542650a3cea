"""Which weights exist on this history."""

import pytest

from learner.hub.ledger.tables.versions import Versions, cut_lineage
from streamrl.messages import Lineage, VersionRef


def test_only_versions_of_the_surviving_history_are_known():
    versions = Versions(3, 7, [Lineage(1, 0, 4), Lineage(2, 4, 7), Lineage(9, 5, 4)])
    versions.published(VersionRef(3, 8))

    known = {(epoch, version) for epoch in range(1, 10) for version in range(12) if versions.known(epoch, version)}

    assert known == {(1, v) for v in range(5)} | {(2, v) for v in range(4, 8)} | {(3, 7), (3, 8)}
    assert versions.lineage[-1] == Lineage(3, 7, 8)


def test_resuming_cuts_every_epoch_to_the_checkpoint():
    assert cut_lineage([Lineage(1, 0, 9), Lineage(2, 8, 12)], 6) == (Lineage(1, 0, 6), Lineage(2, 8, 6))


def test_versions_that_were_never_published_count_all_the_same():
    versions = Versions(1, 0, [])
    for _ in range(7):
        versions.advance()
        if versions.current in (3, 6):
            versions.published(versions.ref)

    assert versions.first_known(5) == VersionRef(1, 5)  # in optimizer steps, published or not
    assert versions.known(1, 7) and not versions.known(1, 8)


def test_versions_only_go_up():
    versions = Versions(2, 5, [])
    for ref in (VersionRef(2, 4), VersionRef(1, 9)):
        with pytest.raises(ValueError, match="versions only go up"):
            versions.check_next(ref)


def test_the_first_known_version_is_named_in_the_epoch_that_made_it():
    versions = Versions(2, 6, [Lineage(1, 0, 6)])

    assert versions.first_known(4) == VersionRef(1, 4)
    assert versions.first_known(0) == VersionRef(1, 0)
    assert Versions(1, 3, []).first_known(2) == VersionRef(1, 3)
