"""The commands that read and train a run's log, at a real run."""

import pytest
import torch
from safetensors.torch import load_file

from streamrl.stream.history import History
from tests.flow.processes import RunHarness
from tests.flow.test_lora_commands import command
from tests.unit.stream.test_rebuilt import write_evaluations


@pytest.mark.parametrize(
    "words", [(), ("policy.lora.rank=4",), ("launch.num_learner_ranks=2",)], ids=["weights", "adapter", "two_ranks"]
)
def test_every_command_reads_the_log_of_a_run(harness: RunHarness, words):
    launched = harness.launch(*words, "trainer.num_steps=4", "launch.num_actors=1")
    assert harness.finish(launched, 400) == 0, harness.logs()
    run, folder = str(harness.run_dir), harness.run_dir

    assert "group  " in command(harness, "stream", run, "--outcome", "accepted")
    assert "4 of 4 versions equal" in command(harness, "replay", run, "--from", "0", "--to", "4")
    assert "cannot be checked" not in command(harness, "replay", run, "--rewards", "--from", "1", "--to", "3")
    assert command(harness, "at", f"{run}@4").endswith("versions/4: equal\n")
    rebuilt, exported = (load_file(one / "model.safetensors") for one in (folder / "versions/4", folder / "model"))
    assert rebuilt.keys() == exported.keys() and all(torch.equal(rebuilt[name], exported[name]) for name in rebuilt)
    assert f"{run}/versions/2" in command(harness, "eval", f"{run}@2", "eval.num_samples=3")
    write_evaluations(folder, [(2, "", 2.0)])  # more than any score
    assert f"{run}/versions/2" in command(harness, "eval", f"{run}@best", "eval.num_samples=3")
    assert command(harness, "at", f"{run}@best").endswith("versions/2: equal\n")
    group = str(History.read(folder).batches[1].cut.plan[0].group_id)  # trained before the checkpoint at the end
    assert f"trained without groups {group}" in command(harness, "at", f"{run}@4", "--without", group, "--out", "less")
    output = command(harness, "what-if", run, "--from", "2", "policy.optimizer.lr=1e-5")
    assert "the run's own settings: 2 of 2 versions bit-equal to the run's" in output
    assert (folder / "what_if.html").exists() and not (folder / ".what-if").exists()
    assert "8 groups" in command(harness, "blame", run, "3..4")
    command(harness, "bundle", run, "--out", "run.tar")
    assert "agrees" in command(harness, "verify", "run.tar", "--level", "hash")
