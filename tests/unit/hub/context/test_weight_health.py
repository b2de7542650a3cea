"""Weight health: roots, probes, quarantine and how it ends."""

import pytest

from learner.hub.context.weight_server import WeightHealthTable
from streamrl.messages import Probed, VersionRef

V1, V2, V3 = VersionRef(1, 1), VersionRef(1, 2), VersionRef(1, 3)
ROOTS = {V1: b"1" * 16, V2: b"2" * 16}
HEALTHY, SILENT = Probed(0.01, 0.2, "", 0.0), Probed(None, None, "", 0.0)
ONE = ("a1", 11)


@pytest.fixture
def health() -> WeightHealthTable:
    return WeightHealthTable(ROOTS.get, 0.1)


def test_only_roots_that_were_published_count(health):
    assert health.usable(*ONE, V1, ROOTS[V1])
    assert not health.usable(*ONE, V1, ROOTS[V2])
    assert not health.usable(*ONE, V1, b""), "it reports no root, so its last one holds"
    assert health.usable(*ONE, V2, ROOTS[V2]), "each version has its own root"
    assert health.usable(*ONE, V1, ROOTS[V1]) and health.usable(*ONE, V1, b"")
    assert health.usable(*ONE, V3, b"3" * 16), "a version that is too old to be known cannot be compared"


@pytest.mark.parametrize(
    "probe",
    [
        Probed(0.11, 0.2, "", 0.0), Probed(float("nan"), 0.2, "", 0.0), Probed(0.0, 0.0, "bucket 3 differs", 0.0),
        Probed(None, None, "bucket 3 differs", 0.0), Probed(float("inf"), float("inf"), "", 0.0),
    ],
)
def test_a_probe_that_fails_means_no_leases_until_one_passes(health, probe, caplog):
    assert health.probed(*ONE, V1, HEALTHY) and health.usable(*ONE, V1, ROOTS[V1])

    assert not health.probed(*ONE, V1, probe)

    assert not health.usable(*ONE, V1, ROOTS[V1]) and not health.usable(*ONE, V2, ROOTS[V2])
    assert "QUARANTINE: a1" in caplog.text and (probe.failed or "nats") in caplog.text
    assert health.probed(*ONE, V2, HEALTHY) and health.usable(*ONE, V2, ROOTS[V2])
    counts = health.metrics()
    assert (counts["num_probes"], counts["num_probe_failures"], counts["num_quarantined"]) == (3, 1, 0)


@pytest.mark.parametrize("name", ["a root that changes", "a probe that changes"])
def test_an_actor_that_is_wrong_again_and_again_does_not_fill_the_log(health, caplog, name):
    for _ in range(1000):
        if name == "a root that changes":
            health.usable(*ONE, V1, ROOTS[V2])
            health.usable(*ONE, V1, ROOTS[V1])
        else:
            health.probed(*ONE, V1, Probed(0.5, 0.9, "", 0.0))
            health.probed(*ONE, V1, HEALTHY)
    assert 1 <= len(caplog.records) < 100


def test_an_actor_that_is_gone_counts_as_quarantined_only_once_it_is_back(health):
    health.probed(*ONE, V1, Probed(0.5, 0.9, "", 0.0))
    health.away("a1")
    gone = health.metrics()
    assert (gone["num_quarantined"], gone["probe_mean_difference"], gone["probe_largest_difference"]) == (0, 0.0, 0.0)

    assert health.quarantined(*ONE), "it is the same process"
    assert health.metrics()["num_quarantined"] == 1 and health.metrics()["probe_mean_difference"] == 0.5


def test_log_probs_that_were_wrong_must_be_right_again_equal_tensors_are_not_enough(health):
    health.probed(*ONE, V1, Probed(0.5, 0.9, "", 0.0))
    assert not health.probed(*ONE, V2, SILENT) and health.quarantined(*ONE)
    assert health.probed(*ONE, V2, HEALTHY) and not health.quarantined(*ONE)


def test_a_new_process_of_the_same_name_starts_with_a_clean_slate(health):
    health.probed(*ONE, V1, Probed(0.5, 0.9, "", 0.0))

    assert not health.usable(*ONE, V1, ROOTS[V1]) and health.usable("a1", 12, V1, ROOTS[V1])
