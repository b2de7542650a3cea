"""Mistakes that settings, files and installed packages show: refused before a run has a directory, with a remedy."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys

import pytest

import streamrl.metrics.trackers.registry as trackers
from learner import preflight
from learner.preflight import check_run
from streamrl.config.load import load_config
from streamrl.config.rules import ENGINES
from streamrl.errors import StreamrlError

QUICKSTART = "experiment=quickstart"
BROKEN = "def record(split, index):\n    return {'prompt': 'x'}\n\ndef reward(record, completion):\n    return 1 / 0\n"

MISTAKES = {
    # keys
    "typo in a key": ([QUICKSTART, "trainer.num_step=3"], "Unknown key `trainer.num_step`: did you mean"),
    "misplaced key": ([QUICKSTART, "optimizer.lr=1e-3"], "did you mean `policy.optimizer.lr`?"),
    "no value": ([QUICKSTART, "verbose"], "`verbose` is not a setting: write key=value"),
    "experiment as a word": (["quickstart"], "`quickstart` is not a setting"),
    "a flag": ([QUICKSTART, "--fast"], "`--fast` is not an option here: settings are key=value"),
    "unknown experiment": (["experiment=quickstar"], "experiment=quickstar is unknown. Did you mean quickstart?"),
    "unknown algorithm": ([QUICKSTART, "algorithm=gpro"], "algorithm=gpro is unknown. Did you mean grpo?"),
    # values
    "text for a number": ([QUICKSTART, "trainer.num_steps=ten"], "trainer.num_steps"),
    "negative learning rate": ([QUICKSTART, "policy.optimizer.lr=-1"], "policy.optimizer.lr=-1"),
    "greedy training": ([QUICKSTART, "rollout.train.sampling.temperature=0"], "use more than 0"),
    "truncated training": ([QUICKSTART, "rollout.train.sampling.top_p=0.9"], "leave top_p at 1.0"),
    "one answer per group": ([QUICKSTART, "rollout.num_responses_per_prompt=1"], "use at least 2"),
    "answers beyond the budget": (
        [QUICKSTART, "rollout.train.sampling.max_new_tokens=9000"], "raise the budget or lower the lengths",
    ),
    "bound below the lead": ([QUICKSTART, "staleness.eta=4", "staleness.max_lag=2"], "raise max_lag or lower eta"),
    "open hub": ([QUICKSTART, "hub.bind=tcp://0.0.0.0:5601"], "bring remote actors in through an encrypted tunnel"),
    "bad run name": ([QUICKSTART, "run.name=my run"], "run.name"),
    "unknown engine": ([QUICKSTART, "actors.engine=vlm"], "actors.engine=vlm is unknown. Did you mean vllm?"),
    "own engine that is not there": ([QUICKSTART, "actors.engine=my_engine:make"], "cannot import 'my_engine'"),
    "unknown transport": ([QUICKSTART, "publish.transports=[ftp,zmq]"], "unknown transports ['ftp']: choose from"),
    "unknown schedule": ([QUICKSTART, "policy.scheduler.name=cosine"], "cosine_with_min_lr"),
    # the task
    "missing task file": ([QUICKSTART, "env.path=no_task.py"], "no_task.py': there is no such file"),
    "data in place of a task": ([QUICKSTART, "env.path=data.jsonl"], "its name must end in .py"),
    "unknown task": ([QUICKSTART, "env.name=string.revers"], "Did you mean string.reverse"),
    "own task that is not there": ([QUICKSTART, "env.name=my_package.tasks:Mine"], "cannot import 'my_package'"),
    "unknown option of a task": ([QUICKSTART, "env.options.max_lenght=3"], "has no option 'max_lenght'. Did you mean"),
    "a reward that raises": ([QUICKSTART, "env.path=broken.py"], "ZeroDivisionError"),
    # models
    "no model": ([], "policy.model_path is not set: give a local checkpoint directory"),
    "a folder without a model": (["policy.model_path=empty"], "policy.model_path=empty holds no config.json: give"),
    "a file as the model": (["policy.model_path=broken.py"], "holds no config.json"),
    "a model of the hub": (
        ["policy.model_path=Qwen/Qwen2.5-0.5B-Instruct"],
        "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct",
    ),
    "no reference model": ([QUICKSTART, "reference.model_path=empty"], "reference.model_path=empty holds no config"),
    # devices and packages
    "no GPU for the learner": ([QUICKSTART, "run.device=cuda"], "0 are visible here: set run.device=cpu"),
    "no GPU for the actors": ([QUICKSTART, "actors.device=cuda"], "no GPU is visible here: set actors.device=cpu"),
    "no bitsandbytes": ([QUICKSTART, "policy.optimizer.name=adam8bit"], "pip install 'streamrl[adam8bit]'"),
    "no wandb": ([QUICKSTART, "tracking.wandb.enabled=true"], "pip install 'streamrl[track]'"),
    "unknown tracker": ([QUICKSTART, "tracking.trackers=[wandbb]"], "Did you mean wandb?"),
    "broadcast without a GPU": ([QUICKSTART, "publish.transports=[nccl,zmq]"], "take nccl off the list"),
    # the objective
    "unknown surrogate": ([QUICKSTART, "loss.surrogate=ppo_clop"], "Did you mean ppo_clip"),
    "unknown estimator": ([QUICKSTART, "advantage.estimator=gea"], "gae"),
    "two ratios": ([QUICKSTART, "advantage.estimator=clipped_is", "loss.surrogate=ppo_clip"], "advantage.estimator"),
    "a kind of KL that is biased here": ([QUICKSTART, "kl.mode=k3"], "kl.mode"),
    "unknown optimizer": ([QUICKSTART, "policy.optimizer.name=adam"], "Did you mean adamw"),
    "an option that does nothing": ([QUICKSTART, "loss.ewma_decay=0.5"], "does nothing without loss.anchor=ewma"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a broken task, data and a folder without a model; no GPU, no extra packages."""
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "data.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = importlib.util.find_spec
    hidden = ("wandb", "bitsandbytes")
    for module in (trackers, preflight):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in hidden else found(name))
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_starts(folder, name):
    words, said = MISTAKES[name]
    before = sorted(folder.iterdir())

    with pytest.raises(StreamrlError) as caught:
        check_run(load_config(words))

    assert said in str(caught.value)
    assert sorted(folder.iterdir()) == before


def test_what_can_run_passes(folder):
    check_run(load_config([QUICKSTART]))


@pytest.mark.parametrize("name", ["missing task file", "a model of the hub", "unknown surrogate"])
def test_launch_says_so_within_seconds_and_makes_no_run_directory(folder, python_env, name):
    words, said = MISTAKES[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    done = subprocess.run([sys.executable, "-m", "streamrl.cli", "launch", *words], env=python_env, cwd=folder,
                          capture_output=True, text=True, timeout=60)

    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "runs").exists()
    assert after.ru_utime - before.ru_utime < 4.0  # of the processor: other tests may hold this one up


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_that_the_rule_knows_can_be_made(name):
    from actors.engines.registry import engine_factory

    assert callable(engine_factory(name))
