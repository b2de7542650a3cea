"""A table of what a Hydra user types: each line works, or is refused with what to type, in both commands."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pytest

import learner.__main__ as learner_main
from streamrl import cli
from streamrl.config.load import load_config, to_plain
from streamrl.config.schema import Config
from streamrl.sweep.pool import Grid

FILES = {
    "conf/experiment/mine.yaml": "# @package _global_\ndefaults: [quickstart, _self_]\ntrainer: {num_steps: 7}\n",
    "conf/size/large.yaml": "# @package policy.tiny\nhidden_size: 128\n",
    "conf/setup.yaml": """
defaults: [config, size: large, override algorithm: grpo, override experiment: mine, _self_]
staleness: {eta: 1}
run: {name: "${env.name}"}
""",
    "conf/swept.yaml": """
defaults: [config, override experiment: mine, override hydra/sweeper: optuna, _self_]
hydra:
  run: {dir: "out/${hydra.job.name}"}
  sweep: {dir: sweeps, subdir: "r${hydra.job.num}"}
  sweeper: {n_trials: 3, params: {staleness.eta: "0,1"}}
""",
    "plain.yaml": "experiment: quickstart\nhydra: {run: {dir: there}, sweep: {dir: sweeps}}\n",
}


@dataclass
class Done:
    """The effect of a command: one run, or the jobs of a sweep, and what it printed."""

    code: int = 0
    run: Config | None = None
    jobs: list[tuple[str, Config]] = field(default_factory=list)
    sweep: Any = None
    printed: str = ""


@pytest.fixture(params=["learner", "streamrl launch"])
def typed(request, tmp_path, monkeypatch, capsys, caplog):
    """Run a command's own main with everything that follows the settings replaced."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    done = Done()

    def one_run(words: list[str], *_: object, **__: object) -> Any:
        done.run = load_config(words)
        return (None, 0) if request.param == "streamrl launch" else 0

    class Jobs:
        """In place of the pool: lists the jobs of a grid, and runs none."""

        def __init__(self, source: Any, make_job: Any, objective: Any, places: Any, *_: Any, **_how: Any) -> None:
            done.sweep = len(places)
            self._source, self._make_job = source, make_job

        def run(self) -> None:
            while isinstance(self._source, Grid) and (found := self._source.next()) is not None:
                job = self._make_job(*found)
                done.jobs.append((str(job.run_dir), load_config(job.words)))

    monkeypatch.setattr(learner_main, "learn", one_run)
    monkeypatch.setattr("streamrl.launch.launch_run", one_run)
    monkeypatch.setattr("streamrl.sweep.sweep.Pool", Jobs)
    for quiet in ("keep_private", "start_log"):
        monkeypatch.setattr(learner_main, quiet, lambda *_, **__: None)
        monkeypatch.setattr(cli, quiet, lambda *_, **__: None)

    def become(_path: str, command: list[str]) -> None:
        module, *words = command[command.index("-m") + 1 :] if "-m" in command[:4] else command[-2:]
        raise _Become(module, words)

    monkeypatch.setattr("os.execv", become)

    def run(line: str) -> Done:
        module, words = ("learner", []) if request.param == "learner" else ("streamrl.cli", [request.param.split()[1]])
        words += shlex.split(line)
        while True:
            monkeypatch.setattr(sys, "argv", [module, *words])
            try:
                done.code = learner_main.main() if module == "learner" else cli.main()
                break
            except _Become as next_program:
                module, words = next_program.args
        done.printed = "".join([*capsys.readouterr(), caplog.text])
        return done

    return run


class _Become(Exception):
    """The program and words that a process becomes."""


QUICK = "experiment=quickstart"


@pytest.mark.parametrize(("line", "wanted"), [
    ("experiment=quickstart trainer.num_steps=3", {"trainer.num_steps": 3, "staleness.eta": 2}),
    ("-cd conf experiment=mine", {"trainer.num_steps": 7, "env.name": "string.reverse"}),
    ("--config-dir=conf experiment=mine trainer.num_steps=8", {"trainer.num_steps": 8}),
    ("hydra.searchpath=[conf] experiment=mine", {"trainer.num_steps": 7}),
    ("hydra.searchpath=[file://conf] experiment=mine", {"trainer.num_steps": 7}),
    ("-cd conf +size=large experiment=mine", {"policy.tiny.hidden_size": 128}),
    ("-cd conf -cn setup", {"trainer.num_steps": 7, "policy.tiny.hidden_size": 128, "staleness.eta": 1,
                            "run.name": "string.reverse", "loss.avg_level": "seq-mean-token-mean"}),
    ("conf/setup.yaml algorithm=dapo trainer.num_steps=9", {"trainer.num_steps": 9, "loss.clip_high": 0.28}),
    ("--config-path conf --config-name setup.yaml ~size", {"policy.tiny.hidden_size": 64}),
    ("-cn config experiment=quickstart", {"trainer.num_steps": 200}),
    ("-cd conf -cn swept", {"run.dir": "out/quickstart", "trainer.num_steps": 7, "sweep.dir": None}),
    ("-cd conf -cn swept hydra.run.dir=here", {"run.dir": "here"}),
    ("plain.yaml", {"run.dir": "there"}),
    ("experiment=quickstart hydra.run.dir=x/y", {"run.dir": "x/y"}),
    ("experiment=quickstart 'hydra.run.dir=x/${hydra.job.name}-${run.seed}'", {"run.dir": "x/quickstart-42"}),
    ("experiment=quickstart hydra.job.name=z hydra.mode=RUN --run", {"run.name": "z"}),
])
def test_a_single_run_has_what_was_typed(typed, line, wanted):
    done = typed(line)
    assert done.code == 0 and done.run is not None, done.printed
    found = {key: attrgetter(key)(done.run) for key in wanted}
    assert {key: getattr(value, "name", value) for key, value in found.items()} == wanted


@pytest.mark.shows("sweep.subdir")
@pytest.mark.parametrize(("line", "wanted"), [
    (f"-m {QUICK} staleness.eta=0,1 hydra.sweep.dir=d",
     [("d/0-staleness.eta-0", 0, 42), ("d/1-staleness.eta-1", 1, 42)]),
    (f"{QUICK} staleness.eta=0,1 --multirun hydra.sweep.dir=d 'hydra.sweep.subdir=r${{hydra.job.num}}'",
     [("d/r0", 0, 42), ("d/r1", 1, 42)]),
    ("-m experiment=mine,quickstart -cd conf hydra.sweep.dir=d staleness.eta=3",
     [("d/0-experiment-mine", 3, 42), ("d/1-experiment-quickstart", 3, 42)]),
    (f"hydra.mode=MULTIRUN {QUICK} 'hydra.sweeper.params.staleness.eta=0,1' 'run.seed=${{hydra.job.num}}' sweep.dir=d",
     [("d/0-staleness.eta-0", 0, 0), ("d/1-staleness.eta-1", 1, 1)]),
    ("-m -cd conf -cn swept hydra/sweeper=basic 'hydra.sweep.subdir=${hydra.job.override_dirname}'",
     [("sweeps/staleness.eta-0", 0, 42), ("sweeps/staleness.eta-1", 1, 42)]),
    ("-m plain.yaml staleness.eta=4,5", [("sweeps/0-staleness.eta-4", 4, 42), ("sweeps/1-staleness.eta-5", 5, 42)]),
])
def test_a_multirun_has_a_job_for_each_combination(typed, line, wanted):
    done = typed(line)
    assert done.code == 0, done.printed
    assert [(name, config.staleness.eta, config.run.seed) for name, config in done.jobs] == wanted


@pytest.mark.parametrize("typed", ["streamrl learner"], indirect=True)
def test_the_command_of_a_learner_sweeps_too(typed):
    done = typed(f"-m {QUICK} staleness.eta=0,1 sweep.dir=d")
    assert done.code == 0 and len(done.jobs) == 2, done.printed


def test_a_launcher_with_jobs_runs_several_at_once(typed):
    done = typed(f"-m {QUICK} staleness.eta=0,1 hydra/launcher=joblib hydra.launcher.n_jobs=2")
    assert (done.code, done.sweep) == (0, 2), done.printed


def test_a_launcher_of_submitit_gets_its_parameters(typed, monkeypatch):
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr("submitit.AutoExecutor.update_parameters", lambda self, **given: taken.append(given))
    parameters = "hydra.launcher.timeout_min=9 hydra.launcher.array_parallelism=3 +hydra.launcher.setup=[a,b]"
    done = typed(f"-m {QUICK} staleness.eta=0,1 hydra/launcher=submitit_local {parameters}")
    assert (done.code, done.sweep) == (0, 3), done.printed
    assert taken == [{"name": "quickstart-0", "timeout_min": 9, "local_setup": ["a", "b"]}]


def test_a_file_that_chooses_a_sweeper_searches(typed):
    done = typed("-m -cd conf -cn swept")
    assert (done.code, done.sweep, done.jobs) == (0, 1, []), done.printed


def test_the_composed_settings_start_the_same_run_as_a_file(typed, tmp_path):
    words = ["conf/setup.yaml", "policy.optimizer.lr=1e-3", "env.options.max_length=5"]
    done = typed(shlex.join([*words, "-c", "job"]))
    assert done.run is None and "name: ${env.name}\n" in done.printed
    resolved = typed(shlex.join([*words, "--cfg", "job", "--resolve"])).printed
    assert "name: string.reverse\n" in resolved and "${" not in resolved
    (tmp_path / "shown.yaml").write_text(resolved)
    assert to_plain(load_config(["shown.yaml"])) == to_plain(load_config(words))


def test_the_settings_of_each_job_of_a_multirun_start_the_same_run_as_a_file(typed, tmp_path):
    words = "-m conf/setup.yaml 'run.seed=${hydra.job.num}' staleness.eta=0,5 algorithm=grpo,dapo"
    jobs = [to_plain(config) for _, config in typed(f"{words} sweep.dir=d").jobs]
    shown = typed(f"{words} --cfg job --resolve")
    assert (shown.code, len(shown.jobs)) == (0, 4) and "# job 3: staleness.eta=5 algorithm=dapo\n" in shown.printed
    found = []
    for text in shown.printed.split("---\n"):
        (tmp_path / "job.yaml").write_text(text)
        found.append(to_plain(load_config(["job.yaml"])))
    assert found == jobs and [one["run"]["seed"] for one in found] == [0, 1, 2, 3]

    shown = typed("-m staleness.eta=0,-1 --cfg job").printed  # without a model, and one is no run
    assert "model_path: null" in shown and "# job 1: staleness.eta=-1\n# refused: staleness.eta=-1 must be" in shown


@pytest.mark.parametrize("line", ["--cfg job", "~algorithm --cfg job --resolve", "algorithm=vtrace -c job"])
def test_settings_without_a_model_are_shown_as_they_are(typed, line):
    done = typed(line)
    assert (done.code, done.run) == (0, None) and "model_path: null" in done.printed


@pytest.mark.parametrize(("line", "says"), [
    ("--cfg hydra", "invalid choice: 'hydra'"), ("--info defaults", "take --cfg job"),
    ("--package x", "take --cfg job"),
    ("--hydra-help", "take --help"), ("--shell-completion install=bash", "streamrl settings WORD"),
    ("--experimental-rerun x.pickle", "take streamrl resume RUN"),
    ("-cn nowhere", "give its directory by --config-dir"),
    ("-cd nowhere experiment=quickstart", "no such directory"), ("-cd", "expected one argument"),
    ("--num_steps 3", "write trainer.num_steps=3"), ("experiment=mien -cd conf", "Did you mean mine?"),
    ("-cd conf size=large", "To append to your default list use +size=large"),
    ("conf/setup.yaml conf/swept.yaml", "both have a defaults list"),
    ("staleness.eta=0,1", "streamrl launch -m staleness.eta=0,1"), ("+foo=1", "Unknown key `foo`"),
    ("staleness.eta=0,1 --cfg job", "streamrl launch -m staleness.eta=0,1"),
    ("-m 'loss.clip_high=interval(0.2,1)' --cfg job", "add sweep.num_grid_points=5"),
    ("-m staleness.eta=0,1 hydra/sweeper=optuna --cfg job", "leave out -m and the sweeper, and give staleness.eta"),
    ("experiment=null", "experiment=None is unknown"),
    ("~trainer.num_steps", "removes nothing"), ("hydra.sweep.dir=x", "use it with streamrl launch -m"),
    ("hydra.verbose=true", "take STREAMRL_LOG"), ("hydra/job_logging=none", "take STREAMRL_LOG"),
    ("hydra.output_subdir=null", "take run.dir"), ("hydra.job.chdir=true", "take run.dir"),
    ("-m staleness.eta=0,1 hydra/launcher=ray", "hydra/launcher=submitit_slurm for Slurm"),
    (f"-m {QUICK} staleness.eta=0,1 hydra.launcher.timeout_min=9", "add hydra/launcher=submitit_slurm"),
    ("-m staleness.eta=0,1 hydra.launcher.submitit_folder=x", "take sweep.dir"),
    ("-m staleness.eta=0,1 hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    ("-m staleness.eta=0,1 hydra.sweeper.sampler.seed=3", "run.seed"),
    ("-m staleness.eta=0,1 hydra.sweeper.study_name=x", "take sweep.dir"),
    (f"-m {QUICK} staleness.eta=0,1 hydra.sweep.subdir=same", "must name a different directory for each run"),
    (f"-m {QUICK} staleness.eta=0,1 hydra.run.dir=x", "use sweep.dir"),
    ("hydra.searchpath=[ --cfg job", "cannot be read: write hydra.searchpath=['DIRECTORY']"),
    ('-cd "it\'s" --cfg job', "it's: no such directory"), ("-cd 'a\\]' --cfg job", "a\\]: no such directory"),
    ("-m hydra.sweeper.max_batch_size=2", "take sweep.num_parallel"), ("~hydra.run.dir", "take run.dir"),
])
def test_the_rest_is_refused_with_what_does_it(typed, line, says):
    done = typed(line)
    assert done.code in (1, 2) and done.run is None and says in done.printed, done.printed
