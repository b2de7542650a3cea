"""A Python function and a list of dictionaries train; callbacks, silence, and a run that goes on from Python."""

import json
import subprocess

import pytest

import streamrl
from streamrl.errors import ControlError
from tests.flow.processes import ROOT, RunHarness

RECORDS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(10) for b in range(10)]
POINTS = {"right": 1.0, "wrong": 0.0}


def _right(text, answer):
    return "right" if text.strip() == answer else "wrong"


def exact(prompts, completions, answer, level, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(level)
    return [POINTS[_right(text, one)] for text, one in zip(completions, answer, strict=True)]


@pytest.fixture
def words(harness: RunHarness, monkeypatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", harness.popen)  # test_api.py starts fresh processes
    monkeypatch.setattr(exact, "__module__", "__main__")
    monkeypatch.setattr(_right, "__module__", "__main__")  # as in a notebook: no other process can import them
    return harness.words("checkpoint.export_hf=false")


def test_a_function_and_a_list_train_in_silence_and_the_run_goes_on(harness: RunHarness, words, capfd):
    steps, evaluations = [], []

    run = streamrl.train(
        overrides=words, reward=exact, data=RECORDS, trainer__num_steps=3, eval__every_steps=2, quiet=True,
        on_step=lambda row: steps.append(row["step"]), on_evaluation=evaluations.append,
    )

    assert capfd.readouterr() == ("", "")
    assert steps == [1, 2, 3]
    assert {0, 3} <= {one["version"] for one in evaluations} <= {0, 2, 3}  # the end may overtake the second
    assert evaluations == run.evaluations and {"score", "step"} <= evaluations[0].keys()
    assert run.steps == 3 and run.extra["run_dir"] == str(harness.run_dir)
    assert run.config.env.path == f"{harness.run_dir}/inputs/reward.py"
    assert len((harness.run_dir / "inputs" / "train.jsonl").read_text().splitlines()) == 100
    assert repr(run).startswith("run         run, finished\nmodel")
    with pytest.raises(ControlError, match="has done its 3 steps"):
        streamrl.resume(run)

    longer = streamrl.resume(run, trainer__num_steps=5, on_step=lambda row: steps.append(row["step"]))

    assert longer.steps == 5 and steps == [1, 2, 3, 4, 5]
    assert longer.config.data.path == run.config.data.path
    out, err = capfd.readouterr()
    assert "run directory" in out and "step 5/5" in err and "\x1b" not in out + err
    assert harness.leftovers() == []


def test_an_exception_in_a_callback_stops_the_run_and_reaches_the_caller(harness: RunHarness, words, capfd):
    def stop(row):
        if row["step"] == 2:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        streamrl.train(overrides=words, reward=exact, data=RECORDS, trainer__num_steps=1000, on_step=stop)

    assert harness.leftovers() == []
    assert f'Resume with:\n  streamrl.resume("{harness.run_dir}")' in capfd.readouterr().out
    summary = json.loads((harness.run_dir / "summary.json").read_text())
    assert 2 <= summary["steps"] < 1000 and summary["stopped"]
