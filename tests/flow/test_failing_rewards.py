"""Rewards that pass the check and fail in the run: said on the terminal of `launch`, counted, never called recovery."""

import re

from tests.flow.processes import RunHarness

DEADLINE_S = 300
"""Of a whole run, on a machine that has other work."""

TASK = """
import threading

calls = 0

def record(split, index):
    return {'prompt': 'x'}

def reward(record, completion):
    global calls
    calls += completion != 'probe'
    if completion != 'probe' and calls % EVERY == 0:
        FAIL
    return len(completion) / 100
"""
RAISES, HANGS = "raise RuntimeError('the judge is away')", "threading.Event().wait()"
CAUSE = "task judged: RuntimeError: the judge is away"


def run(harness: RunHarness, fail: str, every: int, *words: str) -> tuple[int, str, str]:
    """Exit status, terminal and learner's log of a run with this reward."""
    task = harness.path / "judged.py"
    task.write_text(TASK.replace("FAIL", fail).replace("EVERY", str(every)))
    launch = harness.launch(f"env.path={task}", "policy.tiny.num_warm_start_steps=0", *words)
    code = harness.finish(launch, DEADLINE_S)
    log = (harness.run_dir / "logs" / "learner.log").read_text()
    return code, (harness.path / "launch.log").read_text(), log


def test_a_reward_that_always_raises_stops_the_run_with_the_cause(harness: RunHarness):
    code, printed, log = run(harness, RAISES, 1)

    assert code == 1, harness.logs()
    for text in (printed, log):
        assert f"an episode failed: {CAUSE}" in text
    assert f"the run stops: {CAUSE}" in printed  # found by the training episodes or by the evaluation
    assert "The run failed after 0 steps" in printed and "Traceback" not in printed
    assert harness.summary()["failed"].endswith(CAUSE) and "recovered" not in printed
    assert harness.leftovers() == []


def test_a_reward_that_raises_in_half_of_its_calls_is_counted_as_failures(harness: RunHarness):
    code, printed, log = run(harness, RAISES, 2, "trainer.num_steps=3", "hub.num_max_attempts=40")

    assert code == 0, harness.logs()
    summary = harness.summary()
    for text in (printed, log):
        assert f"an episode failed: {CAUSE}" in text
    assert summary["num_episodes_failed"] > 0 and summary["num_leases_retried"] > 0 and summary["failed"] == ""
    assert f"episodes failed: {CAUSE}" in printed  # the summary's row of failures
    assert summary["num_leases_reissued"] > summary["num_leases_retried"] or "leases reissued" not in printed


def test_a_reward_that_hangs_is_told_while_it_hangs_and_stops_the_run(harness: RunHarness):
    code, printed, log = run(harness, HANGS, 1, "env.step_timeout_s=12")

    assert code == 1, harness.logs()
    for text in (printed, log):
        assert re.search(r"still running after 1[0-2] s; the limit is env\.step_timeout_s=12", text)
        assert "hangs, so the run stops: " in text
    assert "none has returned; fix what they wait for, or raise that limit" in harness.summary()["failed"]
    assert "recovered" not in printed and harness.leftovers() == []
