"""Run directories that cannot be made or are taken, and what `status` says of damaged and starting ones."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys

import pytest

from streamrl.config.load import load_config
from streamrl.errors import ConfigError, ControlError, RunLockedError
from streamrl.named_code import is_own
from streamrl.run_dirs import (
    choose_run_dir,
    find_run_dir,
    forget_refused,
    has_learner,
    launch_lock,
    note_start,
    settings_written,
)
from streamrl.verbs.resume import command_of
from streamrl.verbs.runs import NamedRun, find_run
from streamrl.verbs.status import _of_launcher


@pytest.mark.parametrize("root", ["/proc/x", "a-file", "a-file/below"])
@pytest.mark.parametrize("key", ["run.root", "run.dir"])
def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch, key, root):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    config = load_config(["experiment=quickstart", f"{key}={root}"])

    with pytest.raises(ConfigError, match=rf"{key}={root}: choose another one: .* cannot be read or written"):
        with launch_lock(choose_run_dir(config)):
            pass


def test_the_command_says_it_without_a_traceback(tmp_path):
    words = ["launch", "experiment=quickstart", "run.root=/proc/x", "policy.tiny.num_warm_start_steps=0"]
    done = subprocess.run([sys.executable, "-m", "streamrl.cli", *words], capture_output=True, text=True, timeout=110,
                          cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: run.root=/proc/x: choose another one")


def test_one_launch_at_a_time_has_a_run_and_none_while_a_learner_has_it(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr("streamrl.run_dirs.LEARNER_ENDS_S", 0.2)
    with launch_lock(run):
        before = sorted(path.name for path in run.iterdir())
        with pytest.raises(RunLockedError, match="belongs to a run in progress"), launch_lock(run):
            pass
        assert sorted(path.name for path in run.iterdir()) == before
    with (run / "LOCK").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert has_learner(run)
        with pytest.raises(RunLockedError), launch_lock(run):
            pass
    assert not has_learner(run)
    with launch_lock(run):
        pass


def test_a_run_is_found_by_directory_or_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a-001").mkdir(parents=True)
    (tmp_path / "runs" / "a-001" / "run.json").write_text("")
    assert find_run_dir("a-001") == find_run_dir("runs/a-001")
    with pytest.raises(FileNotFoundError, match="runs/ has a-001"):
        find_run_dir("a-002")


def test_a_directory_of_empty_files_is_not_finished(make_run):
    root = make_run()
    shutil.copytree(root, root.with_name("whole"))
    assert find_run(str(root)).how_it_ended() == "finished after 10 steps"
    for name in ("metrics.jsonl", "summary.json", "config.yaml", "status.json", "EPOCH", "run.json"):
        (root / name).write_bytes(b"")
    assert find_run(str(root)).how_it_ended().startswith("killed after an unknown number of steps. Go on with")


@pytest.mark.parametrize(("answer", "said"), [
    ({"processes": [], "will_keep": 2}, "will keep 2 actors alive (process 7)"),
    ({"processes": [], "will_keep": 0}, "keeps 0 actors alive (process 7)"),
    ({"processes": [["actor-0", "runs"]], "will_keep": 0}, "keeps 1 actor alive (process 7)"),
])
def test_a_launcher_that_is_starting_says_how_many_actors_it_will_keep(monkeypatch, tmp_path, answer, said):
    monkeypatch.setattr("streamrl.verbs.status.ask", lambda *_, **__: {**answer, "learner": "loads"})
    monkeypatch.setattr(NamedRun, "has_launcher", True)
    told = dict(_of_launcher(NamedRun(tmp_path, {}, {"pid": 7}, {}), set()))
    assert told["launcher"] == said


@pytest.mark.parametrize("verb", ["launch", "learner"])
def test_what_a_finished_run_was_asked_for_in_addition_outlives_a_start_that_was_killed(tmp_path, verb):
    words = ["streamrl", verb, "experiment=quickstart", "trainer.num_steps=3"]
    note_start(tmp_path, words)
    (tmp_path / "status.json").write_text('{"state": "finished", "total_steps": 3, "version": 3}')
    with pytest.raises(ControlError, match="is over: it has done its 3 steps"):
        command_of(find_run(str(tmp_path)), [])
    more = command_of(find_run(str(tmp_path)), ["trainer.num_steps=9"])

    note_start(tmp_path, ["streamrl", *more])  # and it is killed

    assert command_of(find_run(str(tmp_path)), []) == more
    assert find_run(str(tmp_path)).status == {"state": "starting", "total_steps": 3, "version": 3}


def test_words_that_a_learner_refused_are_not_repeated_by_the_next_resume(tmp_path):
    def start(*words: str, taken: bool) -> list[str]:
        before = settings_written(tmp_path)
        note_start(tmp_path, ["streamrl", "launch", "experiment=quickstart", *words])
        if taken:  # as a learner does that has loaded its checkpoint
            (tmp_path / "config.yaml").write_text(f"seed: {before}")
        forget_refused(tmp_path, before)
        return command_of(find_run(str(tmp_path)), [])[2:-2]

    assert start("a=1", taken=False) == ["a=1"], "nothing else says how the run is started"
    assert start("a=2", taken=True) == ["a=2"]
    assert start("a=2", "policy.lora.rank=4", taken=False) == ["a=2"]
    assert start("a=3", taken=True) == ["a=3"]
    assert is_own(tmp_path / "run.json")
