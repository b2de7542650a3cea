"""`streamrl launch`: one command, watched processes, nothing left behind."""

import json
import os
import signal
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.checkpoint.checkpoint import find_checkpoint
from streamrl.metrics.samples import read_samples
from tests.flow.processes import RunHarness, _command_lines, wait_until

FRESH = pytest.mark.fresh_processes


@pytest.mark.shows("checkpoint.export_hf", "eval.directory", "run.profile_steps", "run.memory_interval_s")
@FRESH
def test_a_launched_run_trains_and_leaves_a_report_and_a_model(harness: RunHarness):
    launch = harness.launch("trainer.num_steps=6", "eval.every_steps=3", "hub.heartbeat_s=0.2",
                            "run.profile_steps=[2]", "run.memory_interval_s=0.1",
                            f"eval.directory={harness.path / 'evals'}")

    assert harness.finish(launch, 120) == 0, harness.logs()
    summary, rows = harness.summary(), harness.metrics()
    assert summary["steps"] == 6 and summary["num_groups_trained"] == 48
    assert summary["eval_score_first"] is not None and summary["eval_score_last"] is not None
    assert [row["step"] for row in rows if "policy/loss" in row] == [1, 2, 3, 4, 5, 6]
    harness.check_metric_keys()
    assert (harness.run_dir / "report.html").read_text().startswith("<!doctype html>")
    printed = (harness.path / "launch.log").read_text()
    assert "evaluation" in printed and "report.html" in printed
    assert (harness.status()["state"], harness.status()["version"]) == ("finished", 6)
    assert harness.leftovers() == []
    trace = (harness.run_dir / "profile" / "step-000002-rank-0.json").read_text()
    assert all(f'"streamrl: {stage}"' in trace for stage in ("wait", "forward_backward", "publish"))
    memory = json.loads((harness.run_dir / "profile" / "memory-rank-0.json").read_text())
    assert memory["num_samples"] > 2 and 1e8 < memory["rss_bytes"]["min"] <= memory["rss_bytes"]["max"] < 1e11
    samples = read_samples(harness.run_dir)
    assert Counter((one.kind, one.step) for one in samples) == (
        {("train", step): 4 for step in range(1, 7)} | {("eval", version): 8 for version in (0, 3, 6)}
    )
    evaluated = {path.name: path.read_bytes().count(b"\n") for path in (harness.path / "evals").iterdir()}
    assert evaluated == {f"eval_step_{step:06d}.jsonl": 8 for step in (0, 3, 6)}
    assert all(one.actor in ("actor-0", "actor-1") and one.prompt and one.tokens for one in samples)
    model = AutoModelForCausalLM.from_pretrained(harness.run_dir / "model")
    AutoTokenizer.from_pretrained(harness.run_dir / "model")
    found = find_checkpoint(harness.run_dir)
    assert found is not None and found.version == 6
    for name, parameter in model.named_parameters():
        saved = torch.empty_like(parameter)
        found.shards().read_into(f"model/model.{name}", saved)
        assert torch.equal(parameter, saved), name


def test_a_dead_actor_is_restarted(harness: RunHarness):
    launch = harness.launch("trainer.num_steps=150", "launch.num_actors=1", "hub.dead_after_s=2",
                          "checkpoint.export_hf=false")
    harness.wait_for_version(3)
    victims = [pid for pid, words in _command_lines() if f"connect={harness.address}" in words]
    os.kill(victims[0], signal.SIGKILL)

    assert harness.finish(launch, 150) == 0, harness.logs()
    assert harness.summary()["num_actor_restarts"] == 1 and not (harness.run_dir / "model").exists()
    assert harness.summary()["num_groups_trained"] == 150 * 8
    assert harness.leftovers() == []


@pytest.mark.parametrize("moment", [
    pytest.param("at start", marks=FRESH), pytest.param("while actors load", marks=FRESH), "in training",
])
def test_ctrl_c_at_any_moment_leaves_nothing_behind_and_says_how_to_resume(harness: RunHarness, moment: str):
    launch = harness.launch("trainer.num_steps=5000", "launch.num_actors=1")
    if moment == "at start":
        wait_until(lambda: (harness.run_dir / "logs" / "learner.log").exists(), 30, "the learner's log")
    elif moment == "while actors load":
        wait_until(lambda: (harness.run_dir / "logs" / "actor-0.log").exists(), 60, "an actor's log")
    else:
        harness.wait_for_version(3, deadline_s=120)

    launch.send_signal(signal.SIGINT)

    assert harness.finish(launch, 60) == 130, harness.logs()
    printed = (harness.path / "launch.log").read_text()
    assert printed.count(f"streamrl resume {harness.run_dir}\n") == 1 and "checkpoint.resume" not in printed
    assert "did not end: killed" not in printed
    assert harness.leftovers() == []


@FRESH
def test_a_killed_launcher_takes_its_children_with_it(harness: RunHarness):
    launch = harness.launch("trainer.num_steps=5000", "launch.num_actors=1")
    harness.wait_for_version(2, deadline_s=120)
    launch.kill()
    launch.wait()
    wait_until(lambda: not harness.leftovers(), 60, f"the end of {harness.leftovers()}")


def test_a_broken_task_fails_at_once_and_by_name(harness: RunHarness):
    broken = harness.path / "broken.py"
    broken.write_text(
        "def record(split, index):\n    return {'prompt': 'x'}\n\ndef reward(record, completion):\n    1 / 0\n"
    )

    launch = harness.launch(f"env.path={broken}", "policy.tiny.num_warm_start_steps=0")

    assert harness.finish(launch, 60) != 0
    assert "ZeroDivisionError" in (harness.path / "launch.log").read_text()
    assert harness.leftovers() == []
