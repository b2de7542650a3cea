"""`streamrl.train` and `streamrl.load_run`, used as a notebook uses them."""

import subprocess
import sys
import textwrap

import pytest
from transformers import AutoModelForCausalLM

import streamrl
from streamrl.errors import ConfigError
from tests.flow.processes import ROOT, RunHarness


def test_a_run_trained_by_a_call_is_read_back(harness: RunHarness, forked_children, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    words = [word for word in harness.words("trainer.num_steps=4", "eval.every_steps=2") if "experiment=" not in word]

    summary = streamrl.train(experiment="quickstart", overrides=words)

    assert summary.steps == 4 and summary.extra["run_dir"] == str(harness.run_dir)
    out, err = capfd.readouterr()
    assert f"run directory: {harness.run_dir}" in out and "tokens trained" in out
    assert "step 4/4" in err, out
    read = streamrl.load_run(summary.extra["run_dir"])
    assert read.summary is not None and read.summary.run_id == summary.run_id
    assert read.config.trainer.num_steps == 4 and read.config.run.name == "quickstart"
    trained = [step for step, loss in zip(read.metrics["step"], read.metrics["policy/loss"], strict=True) if loss]
    assert trained == [1, 2, 3, 4]
    assert read.evaluations[-1]["version"] == 4
    assert read.evaluations[-1]["score"] == summary.eval_score_last
    assert AutoModelForCausalLM.from_pretrained(read.model_path).config.vocab_size > 0
    assert harness.leftovers() == []
    with pytest.raises(ConfigError, match="already holds a run"):
        streamrl.train(experiment="quickstart", overrides=words)


@pytest.mark.fresh_processes
def test_a_script_from_standard_input_can_train(harness: RunHarness):
    words = harness.words("trainer.num_steps=1", "checkpoint.export_hf=false")
    script = f"""
        import streamrl
        summary = streamrl.train(overrides={words!r})
        print("steps", summary.steps)
    """

    done = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(script), cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert "steps 1" in done.stdout, done.stderr + harness.logs()
    assert harness.leftovers() == []
