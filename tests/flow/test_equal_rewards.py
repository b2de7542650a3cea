"""A reward that is always the same: the terminal says so within the first steps, and the samples are there."""

import signal

import pytest

from streamrl.metrics.samples import read_samples
from tests.flow.processes import RunHarness, wait_until

TASK = """
def record(split, index):
    return {'prompt': 'x'}

def reward(record, completion):
    return 0.0
"""


@pytest.mark.parametrize("filtered", [True, False])
def test_rewards_that_teach_nothing_are_told_on_the_terminal(harness: RunHarness, filtered: bool):
    task = harness.path / "zero.py"
    task.write_text(TASK)
    launch = harness.launch(
        f"env.path={task}", "policy.tiny.num_warm_start_steps=0", f"filter.zero_std={str(filtered).lower()}",
        "trainer.num_steps=5", "eval.num_samples=4",
    )
    log = harness.path / "launch.log"
    if filtered:
        wait_until(lambda: "all dropped by filter.zero_std" in log.read_text(), 240, "the sentence", harness.logs)
        wait_until(lambda: any(one.kind == "train" for one in read_samples(harness.run_dir)), 60, "samples")
        launch.send_signal(signal.SIGINT)
        assert harness.finish(launch, 120) == 130, harness.logs()
        assert "every reward was 0; see streamrl samples" in log.read_text()
        assert {one.fate for one in read_samples(harness.run_dir) if one.kind == "train"} == {"zero_std"}
    else:
        assert harness.finish(launch, 300) == 0, harness.logs()
        assert log.read_text().count("and every reward was 0: equal rewards teach nothing") == 1
        assert "every reward was 0" in harness.summary()["warnings"][0]
