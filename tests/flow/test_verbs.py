"""`streamrl status`, `scale`, `drain` and `resume` at one launched run."""

import re
import signal
import sys

from tests.flow.processes import SLOW, RunHarness, wait_until


def streamrl(harness: RunHarness, verb: str, *words: str) -> tuple[int, str]:
    """Exit status and output of a command for the run."""
    done = harness.command(verb, str(harness.run_dir), *words)
    return done.returncode, done.stdout + done.stderr


def actors_of(harness: RunHarness) -> set[str]:
    return {row[0] for row in harness.status()["actors"]}


def test_a_run_is_looked_at_scaled_drained_stopped_and_resumed_by_its_directory(harness: RunHarness):
    launch = harness.launch("trainer.num_steps=5000", "launch.num_actors=1", "checkpoint.export_hf=false", *SLOW)
    harness.wait_for_actor("actor-0", 120)
    harness.wait_for_version(1)

    code, output = streamrl(harness, "status")
    assert code == 0 and " of 5000, version " in output, output
    assert {line.split()[0] for line in output.splitlines()[1:]} == {"learner", "hub", "actor-0", "launcher"}, output
    code, output = streamrl(harness, "drain", "actor-7")
    assert code == 2 and "no actor 'actor-7' is connected. Did you mean actor-0?" in output
    code, output = streamrl(harness, "resume")
    assert code == 2 and "is running" in output

    assert streamrl(harness, "scale", "2") == (0, "started: actor-1\n")
    harness.wait_for_actor("actor-1", 120)
    code, output = streamrl(harness, "drain", "actor-0", "--within", "90")
    # The actor may be between two leases.
    told = r"actor-0 (has no leases|finishes \d+ leases? within 90 s, takes no more) and leaves\n"
    assert code == 0 and re.fullmatch(told, output), output
    wait_until(lambda: actors_of(harness) == {"actor-1"}, 120, "actor-0's leave", harness.logs)
    log = harness.run_dir / "logs" / "actor-0.log"
    wait_until(lambda: "left cleanly" in log.read_text(), 30, "the end of actor-0", harness.logs)
    assert harness.counter("num_evictions") == 0, "what it held was finished or handed back"

    assert streamrl(harness, "scale", "0")[1] == "finish and leave: actor-1\n"
    wait_until(lambda: not actors_of(harness), 120, "actor-1's leave", harness.logs)
    wait_until(
        lambda: sum("no actor is connected" in line for line in harness.status()["notices"]) >= 2, 60,
        "the hub to say again that it has no actors", harness.logs,
    )
    assert "hub       waits for actors: none is connected" in streamrl(harness, "status")[1]

    launch.send_signal(signal.SIGINT)
    assert harness.finish(launch, 60) == 130, harness.logs()
    reached = harness.metrics()[-1]["run/version"]
    assert "stopped at version" in streamrl(harness, "status")[1]
    code, output = streamrl(harness, "scale", "1")
    assert code == 2 and "is over: stopped at version" in output and "streamrl resume" in output

    steps = f"trainer.num_steps={int(reached) + 2}"
    resumed = harness.start("resume", [sys.executable, "-m", "streamrl.cli", "resume", str(harness.run_dir), steps])
    assert harness.finish(resumed, 180) == 0, harness.logs()
    trained = [row["run/version"] for row in harness.metrics() if "policy/loss" in row]
    assert trained == list(range(1, int(reached) + 3)), "every version once, none lost or repeated"
    code, output = streamrl(harness, "resume")
    assert code == 2 and "is over: it has done its" in output
    assert harness.leftovers() == []
