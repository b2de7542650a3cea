"""`streamrl.train` fails and stops as a library call should; a run read back fits a notebook."""

from __future__ import annotations

import json
import sys
import threading
import types

import pytest

import streamrl
from streamrl.config.load import load_config, to_plain
from streamrl.errors import ConfigError, RunFailedError, StreamrlError


def words(here, *more: str) -> list[str]:
    return ["experiment=quickstart", f"run.dir={here / 'run'}", "run.shutdown_s=0.1", *more]


def test_ctrl_c_stops_the_run_and_reaches_the_caller(here):
    (here / "stubborn").touch()  # this learner sends the signal itself

    with pytest.raises(KeyboardInterrupt, match=r"streamrl\.resume\(\"\S+run\"\) continues this run"):
        streamrl.train(overrides=words(here))
    assert not (here / "survived").exists()


def test_a_failed_run_raises_with_its_status_and_its_logs(here):
    (here / "learner" / "__main__.py").write_text("import sys; sys.exit('--check' not in sys.argv and 'no model')")

    with pytest.raises(RunFailedError, match="status 1: see .*run/logs") as caught:
        streamrl.train("quickstart", words(here)[1:])
    assert caught.value.exit_code == 1


def test_a_run_can_be_started_from_another_thread(here):
    (here / "learner" / "__main__.py").write_text("import sys; sys.exit(7 * ('--check' not in sys.argv))")
    raised: list[BaseException] = []

    def train() -> None:
        try:
            streamrl.train(overrides=words(here))
        except StreamrlError as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(30)

    assert [type(error) for error in raised] == [RunFailedError]


def test_an_unknown_setting_starts_nothing(here):
    with pytest.raises(ConfigError, match=r"did you mean `staleness\.eta`"):
        streamrl.train(overrides=words(here, "staleness.etta=1"))
    assert not (here / "run").exists()


@pytest.fixture
def run_dir(make_run):
    root = make_run()
    config = to_plain(load_config(["experiment=quickstart", "staleness.eta=3"]))
    (root / "config.json").write_text(json.dumps({**config, "versions": {"python": "3.11"}}))
    return root


def test_a_run_is_read_as_lists_with_its_evaluations(run_dir):
    run = streamrl.load_run(run_dir)

    assert run.config.staleness.eta == 3 and run.summary is not None and run.model_path is None
    assert run.metrics["step"] == list(range(1, 11)) and run.metrics["reward/mean"][1] == pytest.approx(0.2)
    assert run.metrics["eval/score"] == [0.05, *[None] * 8, 0.5]
    assert run.evaluations == [{"step": 1, "score": 0.05}, {"step": 10, "score": 0.5}]
    (run_dir / "model").mkdir()
    assert streamrl.load_run(run_dir).model_path == run_dir / "model"


def test_a_frame_needs_pandas_and_gets_every_key(run_dir, monkeypatch):
    metrics = streamrl.load_run(run_dir).metrics
    monkeypatch.setitem(sys.modules, "pandas", None)  # importing it now fails
    with pytest.raises(StreamrlError, match="pip install pandas"):
        metrics.frame()
    fake = types.ModuleType("pandas")
    fake.DataFrame = lambda columns: ("frame", columns)
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert metrics.frame() == ("frame", dict(metrics))


def test_a_run_is_named_as_for_every_command_and_each_step_is_one_row(run_dir, monkeypatch):
    (run_dir.parent / "runs").mkdir()
    run_dir.rename(run_dir.parent / "runs" / "quickstart-002")
    monkeypatch.chdir(run_dir.parent)
    with open("runs/quickstart-002/metrics.jsonl", "a") as file:  # what a run writes after its last step
        file.write('{"step": 10, "eval/score": 0.75, "run/wall_s": 21.0}\n')

    run = streamrl.load_run("quickstart-002")

    assert run.metrics["step"] == list(range(1, 11)) and run.metrics["eval/score"][-1] == 0.75
    assert run.metrics["reward/mean"][-1] == 1.0, "both rows of the step are one"
    assert [one["score"] for one in run.evaluations] == [0.05, 0.5, 0.75], "no evaluation is lost"
    with pytest.raises(KeyError, match="no metric 'reward/meen'.* Did you mean reward/mean"):
        run.metrics["reward/meen"]
    with pytest.raises(FileNotFoundError, match="'quickstart-003' is no run directory"):
        streamrl.load_run("quickstart-003")
    with pytest.raises(StreamrlError, match="'quickstart-003' is no run directory"):
        streamrl.load_run("quickstart-003")


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        streamrl.trian  # noqa: B018


def test_actors_may_run_the_written_reward_and_it_is_found_in_the_runs_directory(here):
    (here / "hub-please").write_text("1")

    def exact(completion, answer):
        return float(completion == answer)

    with pytest.raises(FileNotFoundError):  # this learner trains nothing, so there is nothing to read back
        streamrl.train(overrides=words(here, "launch.num_actors=1"), reward=exact, quiet=True,
                       data=[{"prompt": "1", "answer": "1"}])
    (told,) = [path.read_text() for path in here.glob("actor-*")]
    assert f"{here}/run/inputs/reward.py" in told.partition("actors.allow=")[2]
    assert f"env.path={here}/run/inputs/reward.py" in (here / "learner-0").read_text()
