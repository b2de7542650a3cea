"""A run by turns: the engine gives its memory back each time, and a process killed in any state costs nothing."""

import re

import pytest

from tests.flow.processes import RunHarness
from tests.flow.turns import FOLDER, KILLS

WORDS = ("launch.share_gpus=turns", "staleness.eta=0", "policy.optimizer.offload=true", "launch.num_actors=1")
NUM_STEPS = 50
STATES = ("generating", "releasing", "released", "learner", "waking")
GIVEN = re.compile(r"memory of version (\S+) given back: (\d+) bytes held before, (\d+) after, weights of (\d+)")


def check_run(harness: RunHarness, num_steps: int) -> list[tuple[str, int, int, int]]:
    """Assert that nothing was lost; every release of its actors: version, resident before and after, weights."""
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == list(range(1, num_steps + 1)), "every version once, in order"
    summary = harness.summary()
    assert summary["num_groups_trained"] == num_steps * 8 and summary["num_lag_violations"] == 0
    logs = "".join(path.read_text() for path in (harness.run_dir / "logs").glob("actor-*.log"))
    assert "fails its probe" not in logs and "beyond repair" not in logs
    assert harness.leftovers() == []
    return [(version, *map(int, sizes)) for version, *sizes in GIVEN.findall(logs)]


def test_each_release_takes_at_least_the_weights_out_of_the_actor_and_evaluations_have_their_turn(harness):
    launch = harness.launch(
        *WORDS, f"trainer.num_steps={NUM_STEPS}", "eval.every_steps=20", "checkpoint.every_steps=0",
    )
    assert harness.finish(launch, 600) == 0, harness.logs()
    releases = check_run(harness, NUM_STEPS)
    assert len({version for version, *_ in releases}) >= NUM_STEPS, "one for each step"
    for version, before, after, weights in releases:
        assert before - after >= weights > 100_000, (version, before, after, weights)


# A hub that is forked by the tests' server is no child of its learner, by which that is found.
LEARNER = pytest.param("learner", marks=pytest.mark.fresh_processes)


@pytest.mark.parametrize("victim", ["actor", "hub", LEARNER])
def test_a_process_killed_in_any_state_costs_nothing(harness, monkeypatch, victim):
    kills = [f"{state}:{victim}" for state in STATES]
    monkeypatch.setenv(FOLDER, str(harness.path))
    monkeypatch.setenv(KILLS, ",".join(kills))
    num_steps = 16
    launch = harness.launch(
        *WORDS, f"trainer.num_steps={num_steps}", "actors.engine=tests.flow.turns:KillingEngine",
        "checkpoint.every_steps=2", "checkpoint.export_hf=false",
    )
    assert harness.finish(launch, 600) == 0, harness.logs()
    assert len(list(harness.path.glob("kill-*"))) == len(kills), harness.logs()
    assert check_run(harness, num_steps)
    replayed = re.search(r"(\d+) of (\d+) versions equal", harness.command("replay", str(harness.run_dir)).stdout)
    assert replayed is not None and replayed[1] == replayed[2] == str(num_steps), replayed
