"""A second launch of a run that goes on is refused and changes nothing of it."""

import json
import signal

from tests.flow.processes import SLOW, RunHarness, wait_until


def test_a_refused_second_launch_does_not_take_the_run_over(harness: RunHarness):
    first = harness.launch("trainer.num_steps=5000", "launch.num_actors=1", "checkpoint.export_hf=false", *SLOW)
    harness.wait_for_version(1, 240)
    names = ("launch.json", "run.json", "config.yaml", "EPOCH")
    notes = {name: (harness.run_dir / name).read_bytes() for name in names}
    words = harness.words("trainer.num_steps=7", "checkpoint.resume=true", "hub.bind=tcp://127.0.0.1:0")

    second = harness.command("launch", *words)

    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert second.stderr.splitlines()[-1].startswith(f"error: {harness.run_dir} belongs to a run in progress")
    assert {name: (harness.run_dir / name).read_bytes() for name in notes} == notes
    assert "trainer.num_steps=5000" in json.loads(notes["run.json"])["starts"][-1]["command"], "what resume repeats"
    output = harness.command("status", str(harness.run_dir)).stdout
    assert "keeps 1 actor alive" in output, "its launcher still answers"
    reached = harness.status()["version"]
    wait_until(lambda: harness.status()["version"] > reached, 120, "another step of the first one", harness.logs)
    first.send_signal(signal.SIGINT)
    assert harness.finish(first, 120) == 130, harness.logs()
    assert harness.leftovers() == []
