"""Whole sweeps of the real `streamrl launch -m` and `streamrl launch`, with a small program in place of the learner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import yaml

from streamrl.errors import ConfigError, RunLockedError
from streamrl.launch import EXIT_INTERRUPTED
from streamrl.metrics.ranking import Objective
from streamrl.metrics.run_record import read_run
from streamrl.run_dirs import launch_lock
from streamrl.sweep import sweep
from streamrl.sweep.job import JobRun, make_job
from streamrl.sweep.sweep import launch_sweep, resume_command
from streamrl.sweep.words import parse_sweep
from tests.flow.processes import wait_until

pytestmark = pytest.mark.timeout(120)
QUICK = ("experiment=quickstart", "launch.num_actors=0", "sweep.dir=out")
LISTED = "sweep.sampler=tests.fakes.samplers:listed_order"


def ranking(here: Path) -> list[tuple[str, str, float | None]]:
    """(word, outcome, value), best first."""
    runs = json.loads((here / "out" / "sweep.json").read_text())["runs"]
    return [(run["settings"][0].rpartition("=")[2], run["outcome"], run["value"]) for run in runs]


@pytest.mark.shows("sweep.num_parallel", "sweep.dir", "sweep.metric")
def test_a_grid_of_two_at_once_is_ranked_and_a_failed_run_is_not_its_end(here, capfd, monkeypatch):
    monkeypatch.setattr("streamrl.sweep.sweep.num_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    code = launch_sweep([*QUICK, "policy.optimizer.lr=0.25,13.0,0.5,-1", "sweep.num_parallel=2",
                         "sweep.metric=eval_score_best"])

    assert code == 1
    assert ranking(here) == [("0.5", "finished", 10.0), ("0.25", "finished", 5.0), ("13.0", "failed", None),
                             ("-1", "failed", None)]
    environments = [json.loads(path.read_text()) for path in sorted(here.glob("out/*/environment.json"))]
    assert {one["OMP_NUM_THREADS"] for one in environments} == {"4"}
    assert {one["CUDA_VISIBLE_DEVICES"] for one in environments} <= {"4", "6"}
    printed = capfd.readouterr()
    assert "policy.optimizer.lr=-1 must be greater than 0" in printed.out
    assert "job 1 failed: status 1: RuntimeError: the reason of the failure" in printed.out
    assert "not finished" in printed.err
    assert "best            eval_score_best 10.0: policy.optimizer.lr=0.5" in printed.out
    table = (here / "out" / "comparison.md").read_text()
    assert table.index("lr=0.5") < table.index("lr=0.25") < table.index("lr=13.0 (failed)")
    assert (here / "out" / "comparison.html").exists()


def test_a_random_search_draws_from_its_ranges_by_the_seed(here):
    def drawn(name: str, seed: int) -> list[float]:
        words = [*QUICK[:2], f"sweep.dir={name}", "sweep.sampler=random", f"run.seed={seed}", "sweep.num_trials=3"]
        assert launch_sweep([*words, "policy.optimizer.lr=tag(log,interval(1e-3,10))", "sweep.num_parallel=3"]) == 0
        runs = json.loads((here / name / "sweep.json").read_text())["runs"]
        assert [run["value"] for run in runs] == sorted((run["value"] for run in runs), reverse=True)
        return [float(run["settings"][0].rpartition("=")[2]) for run in runs]

    first, again, other = drawn("first", 1), drawn("again", 1), drawn("other", 2)
    assert first == again != other
    assert all(1e-3 <= lr <= 10 for lr in first) and len(set(first)) == 3


@pytest.mark.shows("sweep.num_grid_points")
def test_a_grid_over_an_interval_and_its_best_run_so_far(here, monkeypatch):
    seen, write = [], sweep._write_results

    def look(*args):
        found = write(*args)
        seen.append(tuple(json.loads((here / "out" / name).read_text()) for name in ("best.json", "sweep.json")))
        return found

    monkeypatch.setattr(sweep, "_write_results", look)
    assert launch_sweep([*QUICK, "policy.optimizer.lr=tag(log,interval(0.01,1))", "sweep.num_grid_points=3"]) == 0

    assert [best["value"] for best, _ in seen] == pytest.approx([0.2, 2.0, 20.0, 20.0])
    assert [len(report["runs"]) for _, report in seen] == [1, 2, 3, 3]
    values = [0.2, 2.0, 20.0]
    mean = sum(values) / 3
    spread = (sum((value - mean) ** 2 for value in values) / 3) ** 0.5
    statistics = seen[-1][1]["statistics"]
    assert statistics.pop("best_so_far") == pytest.approx(values)
    assert statistics == pytest.approx(
        {"finished": 3, "mean": mean, "std": spread, "median": 2.0, "min": 0.2, "max": 20.0}
    )


@pytest.mark.parametrize("subdir", [None, "run-{num}", "{overrides}-{num}", "{num}-of-{num}", "{overrides}"])
def test_statistics_are_of_every_run_whatever_its_directory_is_called(make_run, tmp_path, subdir):
    values = {f"staleness.eta={12 - at}": (at * 5 % 12) / 16 for at in range(12)}
    for at, (word, value) in enumerate(values.items()):
        run = make_run(make_job(Path(), (), subdir, at, (word,)).run_dir.name, num_steps=1)
        ended = json.loads((run / "summary.json").read_text()) | {"eval_score_last": value}
        (run / "summary.json").write_text(json.dumps(ended))
    sweep._write_results(tmp_path, Objective(), [], subdir)

    statistics = json.loads((tmp_path / "sweep.json").read_text())["statistics"]
    assert (statistics["finished"], statistics["mean"]) == (12, sum(values.values()) / 12)
    in_order = values if "{num}" in (subdir or "{num}") else sorted(values, key=lambda word: word.replace("=", "-"))
    assert statistics["best_so_far"] == list(accumulate((values[word] for word in in_order), max))


@pytest.mark.parametrize("word", [
    "policy.optimizer.lr=0.00012345,0.00012341", "rollout.train.sampling.stop=['<'],['>']",
    f"data.path=/{'folder/' * 20}a.jsonl,/{'folder/' * 20}b.jsonl", "env.options.word='a b','a\\'b','ä','ö','x\ny'",
])
def test_every_combination_has_a_directory_of_its_own_which_tells_its_words(tmp_path, word):
    words = parse_sweep([word])
    for subdir in (None, "{num}", "{overrides}"):
        jobs = [make_job(tmp_path / str(subdir), (), subdir, at, swept) for at, swept in enumerate(words.grid())]
        assert len({job.run_dir for job in jobs}) == len(jobs) > 1
        for job in jobs:
            JobRun(job)
            (job.run_dir / "metrics.jsonl").touch()
            assert read_run(job.run_dir).overrides == list(job.swept)
            assert yaml.safe_load((job.run_dir / "overrides.yaml").read_text()) == list(job.swept)


def test_a_search_prunes_what_is_behind_and_says_so(here, capfd):
    (here / "hold-below").write_text("0.1")

    code = launch_sweep([*QUICK, LISTED, "policy.optimizer.lr=0.5,0.01,13.0,0.7", "sweep.num_trials=4",
                         "sweep.num_startup_trials=1"])

    assert code == 1, "one has failed"
    assert ranking(here) == [("0.7", "finished", 14.0), ("0.5", "finished", 10.0), ("0.01", "pruned", 0.2),
                             ("13.0", "failed", None)]
    [pruned] = here.glob("out/1-*")
    assert read_run(pruned).summary.stopped == "pruned at step 10"
    assert "pruned at step 10" in (pruned / "report.html").read_text()
    assert "0.01 (pruned at step 10)" in (here / "out" / "comparison.md").read_text()
    assert "job 1 is pruned at step 10" in capfd.readouterr().out


def test_ctrl_c_stops_every_run_and_names_the_command_that_goes_on(here):
    (here / "hold-below").write_text("100")
    words = [*QUICK, LISTED, "policy.optimizer.lr=0.5,0.25,0.75", "sweep.num_trials=3", "sweep.num_parallel=2",
             "sweep.pruner=none"]
    with (here / "sweep.log").open("w") as log:
        sweep = subprocess.Popen([sys.executable, "-m", "streamrl.cli", "launch", "-m", *words], stdout=log,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: len(list(here.glob("out/*/environment.json"))) == 2, 60, "two runs")
    os.killpg(sweep.pid, signal.SIGINT)

    assert sweep.wait(60) == EXIT_INTERRUPTED
    printed = (here / "sweep.log").read_text()
    assert resume_command(words, Path("out")) in printed and "Traceback" not in printed
    assert [outcome for _, outcome, _ in ranking(here)] == ["unfinished", "unfinished"]

    (here / "hold-below").unlink()
    assert launch_sweep([*words, "checkpoint.resume=true"]) == 0
    assert ranking(here) == [("0.75", "finished", 15.0), ("0.5", "finished", 10.0), ("0.25", "finished", 5.0)]
    resumed = [path.read_text().count("run directory") for path in sorted(here.glob("out/*/logs/launch.log"))]
    assert resumed == [2, 2, 1]


def test_runs_end_when_the_sweep_is_killed(here):
    (here / "hold-below").write_text("100")
    with (here / "sweep.log").open("w") as log:
        sweep = subprocess.Popen([sys.executable, "-m", "streamrl.cli", "launch", "-m", *QUICK,
                                  "policy.optimizer.lr=0.5,0.25", "sweep.num_parallel=2"], stdout=log,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: len(list(here.glob("out/*/environment.json"))) == 2, 60, "two runs")
    sweep.kill()
    sweep.wait()

    wait_until(lambda: len(list(here.glob("out/*/summary.json"))) == 2, 60, "the end of both runs")


def test_a_resumed_grid_does_only_what_is_left(here, capfd):
    launch_sweep([*QUICK, "policy.optimizer.lr=0.5,0.25"])
    (here / "out" / "1-policy.optimizer.lr-0.25" / "summary.json").unlink()
    capfd.readouterr()

    assert launch_sweep([*QUICK, "policy.optimizer.lr=0.5,0.25", "checkpoint.resume=true"]) == 0
    printed = capfd.readouterr().out
    assert "=== job 1" in printed and "=== job 0" not in printed and "job 0 finished before" in printed


@pytest.mark.parametrize("subdir", [None, "run-{num}", "{overrides}"])
def test_a_grid_that_goes_on_with_other_values_does_each_once_under_its_own_number(here, capfd, subdir):
    form = () if subdir is None else (f'sweep.subdir="{subdir}"',)
    assert launch_sweep([*QUICK, *form, "policy.optimizer.lr=0.5,0.25"]) == 0
    capfd.readouterr()

    assert launch_sweep([*QUICK, *form, "policy.optimizer.lr=0.125,0.75,0.25", "checkpoint.resume=true"]) == 0
    printed = capfd.readouterr().out
    assert printed.count("=== job") == 2 and printed.count("finished before: eval_score_last 5;") == 1
    assert ranking(here) == [(str(lr), "finished", 20 * lr) for lr in (0.75, 0.5, 0.25, 0.125)]
    assert len({path.parent for path in here.glob("out/*/summary.json")}) == 4


def test_runs_that_are_done_are_no_results_of_other_settings(here):
    lr = "policy.optimizer.lr=0.5,13.0"
    assert launch_sweep([*QUICK, lr]) == 1
    before = (here / "out" / "sweep.json").read_text()
    for word in ("algorithm=dr_grpo", "trainer.num_steps=7", "env.options.max_length=5", "run.seed=3",
                 "eval.num_samples=3", "learner.num_epochs=2"):
        with pytest.raises(ConfigError, match=f"1 runs that are done, with no .*, and these words have {word}: give"):
            launch_sweep([*QUICK, lr, word, "checkpoint.resume=true"])
    with pytest.raises(ConfigError, match="with experiment=quickstart, and these words have experiment=countdown"):
        launch_sweep(["experiment=countdown", *QUICK[1:], lr, "checkpoint.resume=true"])
    assert (here / "out" / "sweep.json").read_text() == before
    around = ("hub.dead_after_s=60", "sweep.num_parallel=2", "learner.max_tokens_per_device=2048", "run.name=o")
    assert launch_sweep([*QUICK, lr, *around, "checkpoint.resume=true"]) == 1
    assert [value for _, _, value in ranking(here)] == [10.0, None]


def test_a_sweep_is_that_of_one_process_and_a_run_that_of_its_own_launcher(here, capfd):
    """Another sweep is refused; a run that somebody else does is left as it is, and ends as it ends there."""
    (here / "hold-below").write_text("100")
    words = [*QUICK, "policy.optimizer.lr=0.5"]
    with (here / "sweep.log").open("w") as log:
        first = subprocess.Popen([sys.executable, "-m", "streamrl.cli", "launch", "-m", *words], stdout=log,
                                 stderr=subprocess.STDOUT)
    wait_until(lambda: len(list(here.glob("out/*/environment.json"))) == 1, 60, "its run")
    with pytest.raises(RunLockedError, match="sweep.dir=out belongs to a sweep in progress"):
        launch_sweep([*words, "checkpoint.resume=true"])
    assert [path.name for path in here.glob("out/*/failure.txt")] == []
    (here / "hold-below").unlink()
    assert first.wait(60) == 0 and read_run(here / "out" / "0-defaults").state == "finished"

    [run] = here.glob("out/0-*")
    (run / "summary.json").unlink()
    with launch_lock(run):
        assert launch_sweep([*words, "checkpoint.resume=true"]) == 1
    assert "belongs to a run in progress" in capfd.readouterr().out and not (run / "failure.txt").exists()


def test_a_failed_run_that_is_resumed_by_itself_is_no_longer_a_failed_one(here):
    launch_sweep([*QUICK, "policy.optimizer.lr=13.0"])
    [run] = here.glob("out/0-*")
    assert read_run(run).state == "failed"
    command = ["launch", *QUICK[:2], "policy.optimizer.lr=0.5", f"run.dir={run}", "checkpoint.resume=true"]
    subprocess.run([sys.executable, "-m", "streamrl.cli", *command], check=True, timeout=60)
    assert read_run(run).state == "finished" and read_run(run).failure == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.sampler=tpe"], "sweep.sampler=tpe needs a setting to search"),
        (["sweep.sampler=tpe", "staleness.eta=0,2", "sweep.metric=wall_s"], "add sweep.pruner=none"),
        (["staleness.eta=0,2", "sweep.metric=eval_score_lost"], "Did you mean eval_score_last"),
        (["staleness.eta=0,2", "run.dir=there"], "run.dir names one directory"),
        (["sweep.num_trials=2,3"], "sweep.num_trials applies to the whole sweep: give it one value"),
        (["staleness.eta=0,2", "sweep.num_parallel=2", "hub.bind=tcp://127.0.0.1:5601"], "hub.bind fixes port 5601"),
        (["policy.optimizer.lr=-1,-2"], "policy.optimizer.lr=-1 must be greater than 0"),
        (["staleness.eta=0,2", "checkpoint.resume=true", "sweep.dir=null"], "add sweep.dir=..."),
        (["staleness.eta=0,2", "sweep.dir=."], "already holds files"),
    ],
)
def test_an_impossible_sweep_is_refused_before_anything_is_made(here, words, message):
    before = sorted(here.iterdir())
    with pytest.raises(ConfigError) as caught:
        launch_sweep([*QUICK, *words])
    assert message in str(caught.value)
    assert sorted(here.iterdir()) == before
