"""`streamrl launch`: one command, watched processes, nothing left behind."""

from __future__ import annotations

import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.checkpoint.checkpoint import find_checkpoint
from tests.flow.processes import Stage, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]


def test_a_launched_run_trains_and_leaves_a_report_and_a_model(stage: Stage):
    launch = stage.launch("trainer.num_steps=6", "eval.every_steps=3")

    assert stage.finish(launch, 120) == 0, stage.logs()
    summary, rows = stage.summary(), stage.metrics()
    assert summary["steps"] == 6 and summary["num_groups_trained"] == 48
    assert summary["eval_score_first"] is not None and summary["eval_score_last"] is not None
    assert [row["step"] for row in rows if "policy/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert (stage.run_dir / "report.html").read_text().startswith("<!doctype html>")
    printed = (stage.path / "launch.log").read_text()
    assert "evaluation" in printed and "report.html" in printed
    assert (stage.status()["state"], stage.status()["version"]) == ("finished", 6)
    assert stage.leftovers() == []
    model = AutoModelForCausalLM.from_pretrained(stage.run_dir / "model")
    AutoTokenizer.from_pretrained(stage.run_dir / "model")
    found = find_checkpoint(stage.run_dir)
    assert found is not None and found.version == 6
    for name, parameter in model.named_parameters():
        saved = torch.empty_like(parameter)
        found.shards().read_into(f"model/model.{name}", saved)
        assert torch.equal(parameter, saved), name


def test_a_dead_actor_is_restarted(stage: Stage):
    launch = stage.launch("trainer.num_steps=150", "launch.num_actors=1", "hub.dead_after_s=2",
                          "checkpoint.export_hf=false")
    stage.wait_for_version(3)
    _kill_actor(stage)

    assert stage.finish(launch, 150) == 0, stage.logs()
    assert stage.summary()["num_actor_restarts"] == 1 and not (stage.run_dir / "model").exists()
    assert stage.summary()["num_groups_trained"] == 150 * 8
    assert stage.leftovers() == []


@pytest.mark.parametrize("moment", ["at start", "while actors load", "in training"])
def test_ctrl_c_at_any_moment_leaves_nothing_behind_and_says_how_to_resume(stage: Stage, moment: str):
    launch = stage.launch("trainer.num_steps=5000")
    if moment == "at start":
        wait_until(lambda: (stage.run_dir / "logs" / "learner.log").exists(), 30, "the learner's log")
    elif moment == "while actors load":
        wait_until(lambda: (stage.run_dir / "logs" / "actor-0.log").exists(), 60, "an actor's log")
    else:
        stage.wait_for_version(3)

    launch.send_signal(signal.SIGINT)

    assert stage.finish(launch, 60) == 130, stage.logs()
    printed = (stage.path / "launch.log").read_text()
    assert f"run.dir={stage.run_dir} checkpoint.resume=true" in printed
    assert stage.leftovers() == []


def test_a_killed_launcher_takes_its_children_with_it(stage: Stage):
    launch = stage.launch("trainer.num_steps=5000")
    stage.wait_for_version(2)

    launch.kill()
    launch.wait()

    wait_until(lambda: not stage.leftovers(), 60, f"the end of {stage.leftovers()}")


def test_a_broken_task_fails_at_once_and_by_name(stage: Stage):
    broken = stage.path / "broken.py"
    broken.write_text(
        "def record(split, index):\n    return {'prompt': 'x'}\n\ndef reward(record, completion):\n    1 / 0\n"
    )

    launch = stage.launch(f"env.path={broken}", "policy.tiny.num_warm_start_steps=0")

    assert stage.finish(launch, 60) != 0
    assert "ZeroDivisionError" in (stage.path / "launch.log").read_text()
    assert stage.leftovers() == []


def _kill_actor(stage: Stage) -> None:
    from tests.flow.processes import _command_lines

    victims = [pid for pid, words in _command_lines() if f"connect={stage.address}" in words]
    assert victims, stage.logs()
    import os

    os.kill(victims[0], signal.SIGKILL)
