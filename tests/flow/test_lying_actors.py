"""One of three real actors lies: it is shut out by name, and the run ends well with the other two."""

import sys

import pytest

from tests.flow.processes import RunHarness

NUM_STEPS = 60
LIES = {
    "offset": "log-probs differ from the learner's",
    "rewards": "the mean reward of its answers is 1,",
    "short": "the length of its answers in tokens (geometric mean) is 1,",
    "draws": "are not what their seeds draw",
}


@pytest.mark.parametrize("lie", LIES)
def test_an_actor_that_lies_is_shut_out_by_name(harness: RunHarness, lie: str):
    by_audit = lie in ("offset", "draws")  # which of the two finds wrong log-probs first is a matter of time
    learner = harness.learner(
        f"trainer.num_steps={NUM_STEPS}", "staleness.eta=1", "trust.audit_share=1", "actors.num_concurrent=16",
        f"trust.outlier_errors={0 if by_audit else 8}",
    )
    honest = [harness.actor(name) for name in ("honest-0", "honest-1")]
    liar = harness.start("liar", [
        sys.executable, "-m", "tests.fakes.lying_actor", lie, f"connect={harness.address}", "actors.actor_id=liar",
    ])

    assert harness.finish(learner, 300) == 0, harness.logs()
    assert [harness.finish(actor, 15) for actor in honest] == [0, 0], harness.logs()
    assert harness.finish(liar, 15) == 7, harness.logs()

    told = [notice for notice in harness.status()["notices"] if "QUARANTINE" in notice]
    assert len(told) == 1 and "liar is shut out because" in told[0] and LIES[lie] in told[0], told
    assert LIES[lie] in (harness.path / "liar.log").read_text()
    last = harness.metrics()[-1]
    assert last["hub/num_shut_out"] == 1 and last["hub/num_groups_trained"] == NUM_STEPS * 8
    assert last["hub/num_tokens_redrawn"] > 0


def test_honest_actors_are_never_shut_out(harness: RunHarness):
    learner = harness.learner(
        f"trainer.num_steps={NUM_STEPS}", "staleness.eta=1", "trust.audit_share=1", "actors.num_concurrent=16",
    )
    actors = [harness.actor(f"honest-{number}") for number in range(3)]

    assert harness.finish(learner, 300) == 0, harness.logs()
    assert [harness.finish(actor, 15) for actor in actors] == [0] * 3, harness.logs()
    last = harness.metrics()[-1]
    assert last["hub/num_shut_out"] == 0 and last["hub/num_tokens_redrawn"] > 256
    assert last["hub/audit_mean_difference"] < 1e-4
