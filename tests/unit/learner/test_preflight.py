"""Mistakes that settings, files and installed packages show: refused before a run has a directory, with a remedy."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import streamrl.metrics.trackers.registry as trackers
from learner.model.config_file import model_config
from learner.model.tiny import make_tiny_model
from learner.setup.model_hub import find_models
from learner.setup.preflight import check_run, models_of
from streamrl.config.load import load_config
from streamrl.config.rules import ENGINES
from streamrl.errors import ConfigError, StreamrlError
from streamrl.launch import launch_run

QUICKSTART = "experiment=quickstart"
HANGS = "import threading\n\n" + (
    "def record(split, index):\n    return {'prompt': 'x'}\n\n"
    "def reward(record, completion):\n    return float(threading.Event().wait())\n"
)
MATH_VERIFY = """
from math_verify import parse, verify

def record(split, index):
    return {'prompt': 'x'}

def reward(record, completion):
    return float(verify(parse('$1$'), parse(completion)))
"""
HIDDEN_ALARM = MATH_VERIFY.replace("    return float(", "    try:\n        return float(") + (
    "    except Exception:\n        return 0.0\n"
)
LONG = (
    "def record(split, index):\n    return {'prompt': 'x' * 500}\n\ndef reward(record, text):\n    return 1.0\n\n"
    "def target(record):\n    return 'x'\n"
)
NO_TARGET = LONG.replace("* 500", "* 5").partition("def target")[0]
PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
GUESS = re.search(r"```python\n(# guess\.py\n.*?)```", PAGE, re.DOTALL)[1]
SYSTEM = {
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1 = ?"}], "answer": "2",
}
NO_ENV = "class Calc:\n    name = 'calc'\n\n    def record(self, split, index): ...\n\n    def env(self): ...\n"
BROKEN = "def record(split, index):\n    return {'prompt': 'x'}\n\ndef reward(record, completion):\n    return 1 / 0\n"

MISTAKES = {
    # keys
    "typo in a key": ([QUICKSTART, "trainer.num_step=3"], "Unknown key `trainer.num_step`: did you mean"),
    "misplaced key": ([QUICKSTART, "optimizer.lr=1e-3"], "did you mean `policy.optimizer.lr`?"),
    "no value": ([QUICKSTART, "verbose"], "`verbose` is not a setting: write key=value"),
    "experiment as a word": (["quickstart"], "`quickstart` is not a setting"),
    "a flag": ([QUICKSTART, "--fast"], "`--fast` is not an option here: settings are key=value"),
    "an option of another library": ([QUICKSTART, "--lr", "1e-4"], "`--lr 1e-4` is not an option here: settings are "
                                     "key=value, write policy.optimizer.lr=1e-4"),
    "an option with its value": ([QUICKSTART, "--learning-rate=1e-4"], "write policy.optimizer.lr=1e-4"),
    "an option before a setting": ([QUICKSTART, "--temprature", "run.seed=3"], "sampling.temperature=VALUE"),
    "a setting as an option": ([QUICKSTART, "--trainer.num_steps", "3"], "write trainer.num_steps=3"),
    "unknown experiment": (["experiment=quickstar"], "experiment=quickstar is unknown. Did you mean quickstart?"),
    "unknown algorithm": ([QUICKSTART, "algorithm=gpro"], "algorithm=gpro is unknown. Did you mean grpo?"),
    "name of a learning rate elsewhere": ([QUICKSTART, "lr=1e-5"], "did you mean `policy.optimizer.lr`?"),
    "long name of a learning rate": ([QUICKSTART, "learning_rate=1e-5"], "did you mean `policy.optimizer.lr`?"),
    "name of a model elsewhere": ([QUICKSTART, "model=x"], "did you mean `policy.model_path`?"),
    "LoRA": ([QUICKSTART, "lora.rank=8"], "did you mean `policy.lora.rank`?"),
    "a task file as a word": (["my_task.py"], "Did you mean env.path=my_task.py?"),
    "a missing settings file": (["my.yaml"], "my.yaml: no such settings file"),
    # values
    "a list that is not closed": ([QUICKSTART, "publish.transports=[shm"], "cannot be read: a list is"),
    "several values without -m": ([QUICKSTART, "staleness.eta=0,4"], "streamrl launch -m staleness.eta=0,4"),
    "a setting removed": ([QUICKSTART, "~env.options"], "removes nothing: every setting has a value"),
    "unknown choice": ([QUICKSTART, "staleness.mode=dropp"], "Did you mean drop?"),
    "text for a number": ([QUICKSTART, "trainer.num_steps=ten"], "trainer.num_steps=ten must be a whole number"),
    "negative learning rate": ([QUICKSTART, "policy.optimizer.lr=-1"], "policy.optimizer.lr=-1"),
    "greedy training": ([QUICKSTART, "rollout.train.sampling.temperature=0"], "use more than 0"),
    "candidates that fill an actor's memory": (
        [QUICKSTART, "actors.engine=vllm", "policy.tiny.num_heads=2", "rollout.train.sampling.top_p=0.9",
         "rollout.train.sampling.max_new_tokens=64", "rollout.train.sampling.max_kept=60000",
         "actors.num_concurrent=64"],
        "of an actor's memory: set it to",
    ),
    "one answer per group": ([QUICKSTART, "rollout.num_responses_per_prompt=1"], "use at least 2"),
    "answers beyond the budget": (
        [QUICKSTART, "rollout.train.sampling.max_new_tokens=9000"], "raise the budget or lower the lengths",
    ),
    "bound below the lead": ([QUICKSTART, "staleness.eta=4", "staleness.max_lag=2"], "raise max_lag or lower eta"),
    "minibatches that leave a rest": ([QUICKSTART, "learner.num_minibatches=3"], "does not divide rollout.num_prompts"),
    "minibatches with fewer groups than ranks": (
        [QUICKSTART, "learner.num_minibatches=16", "launch.num_learner_ranks=2"], "every rank needs one of each",
    ),
    "copies of a model that do not divide the ranks": (
        [QUICKSTART, "learner.mesh.replicate=2"], "set launch.num_learner_ranks to a multiple of 2, or change an axis",
    ),
    "a remote teacher that several ranks would ask": (
        [QUICKSTART, "learner.mesh.tensor=2", "launch.num_learner_ranks=2", "algorithm=distill",
         "distill.teacher=http://127.0.0.1:1/v1"], "would each ask and get other answers",
    ),
    "trajectories longer than a row of all ranks": (
        [QUICKSTART, "learner.mesh.context=2", "launch.num_learner_ranks=2", "learner.max_tokens_per_device=133"],
        "learner.max_tokens_per_device=133 on learner.mesh.context=2 ranks cannot hold the longest",
    ),
    "tensor ranks without ranks": (
        [QUICKSTART, "learner.mesh.tensor=4", "launch.num_learner_ranks=2"], "to a multiple of 4, or change an axis",
    ),
    "axes that make other ranks": (
        [QUICKSTART, "learner.mesh.replicate=2", "learner.mesh.shard=3", "launch.num_learner_ranks=4"],
        "set launch.num_learner_ranks to 6",
    ),
    "versions inside a batch that has none": (
        [QUICKSTART, "publish.when=every_optimizer_step"], "set learner.num_minibatches or learner.num_epochs",
    ),
    "a bound below the steps of one batch": (
        [QUICKSTART, "staleness.max_lag=2", "learner.num_epochs=4"], "whose last one trains at lag 11",
    ),
    "a ratio in advantages that several steps share": (
        [QUICKSTART, "algorithm=impala", "learner.num_epochs=2"], "which 2 optimizer steps share",
    ),
    "open hub": ([QUICKSTART, "hub.bind=tcp://0.0.0.0:5601"], "make keys with `streamrl keys new keys`"),
    "every interface": ([QUICKSTART, "hub.bind=tcp://0.0.0.0:5601", "hub.keys=k"], "add hub.advertise=NAME"),
    "no keys": ([QUICKSTART, "hub.keys=no-such-folder"], "run `streamrl keys new no-such-folder`"),
    "bad address": ([QUICKSTART, "hub.bind=tcp://127.0.0.1:x"], "must look like tcp://127.0.0.1:5601"),
    "port in use": ([QUICKSTART, "hub.bind=tcp://127.0.0.1:{port}"], "choose another port (0: any free)"),
    "bad run name": ([QUICKSTART, "run.name=my run"], "run.name"),
    "unknown engine": ([QUICKSTART, "actors.engine=vlm"], "actors.engine=vlm is unknown. Did you mean vllm?"),
    "own engine that is not there": ([QUICKSTART, "actors.engine=my_engine:make"], "cannot import 'my_engine'"),
    "unknown transport": ([QUICKSTART, "publish.transports=[ftp,zmq]"], "unknown transports ['ftp']: choose from"),
    "unknown schedule": ([QUICKSTART, "policy.scheduler.name=cosine"], "cosine_with_min_lr"),
    # the task
    "missing task file": ([QUICKSTART, "env.path=no_task.py"], "no_task.py': no such file"),
    "data in place of a task": ([QUICKSTART, "env.path=data.jsonl"], "its name must end in .py"),
    "unknown task": ([QUICKSTART, "env.name=string.revers"], "Did you mean string.reverse"),
    "own task that is not there": ([QUICKSTART, "env.name=my_package.tasks:Mine"], "cannot import 'my_package'"),
    "unknown option of a task": ([QUICKSTART, "env.options.max_lenght=3"], "has no option 'max_lenght'. Did you mean"),
    "a reward that hangs": (
        [QUICKSTART, "env.path=hangs.py", "env.step_timeout_s=0.1"], "step ran for more than env.step_timeout_s=0.1",
    ),
    "math_verify with its defaults": (
        [QUICKSTART, "env.path=math_task.py"], "math_verify: parsing_timeout=None and timeout_seconds=None",
    ),
    "signal.alarm in a reward that hides the error": (
        [QUICKSTART, "env.path=hidden_alarm.py"], "uses signal.alarm and hides that it failed",
    ),
    "an environment without its number of records": ([QUICKSTART, "env.path=calc.py"], "Calc lacks num_records"),
    "prompts too long for the tiny model": ([QUICKSTART, "env.path=long.py"], "Set rollout.max_prompt_tokens=640"),
    "a system message and the tiny model": (
        [QUICKSTART, "data.path=system.jsonl", "data.test_ratio=0", "reward.type=exact"],
        "messages system, user. To go on, use policy.model_path=... (`make smollm2` gets a small one), or drop the",
    ),
    "tools and the tiny model": (
        [QUICKSTART, "env.tools=[calculator]", "env.max_turns=3"], "or leave env.tools out",
    ),
    "no right answers for the tiny model": ([QUICKSTART, "env.path=no_target.py"], "knows no right answers: give it"),
    "a game and the tiny model": ([QUICKSTART, "env.path=guess.py", "env.max_turns=5"], "knows no right answers"),
    "a syntax error": ([QUICKSTART, "env.path=syntax.py"], "SyntaxError: '(' was never closed (syntax.py, line 1)"),
    "a reward that raises": ([QUICKSTART, "env.path=broken.py"], "ZeroDivisionError"),
    # evaluation sets
    "unknown key of a set": ([QUICKSTART, "eval.datasets.hard.fil=x.jsonl"], "Unknown key `eval.datasets.hard.fil`"),
    "a set twice": ([QUICKSTART, "eval.datasets={a: x.jsonl, a: y.jsonl}"], "names a twice"),
    "a set without its file": (
        [QUICKSTART, "eval.datasets.hard={path: no.jsonl, reward: {type: exact}}"], "eval.datasets.hard: data.path=no",
    ),
    "a set without a reward": (
        [QUICKSTART, "eval.datasets.hard=data.jsonl"], "eval.datasets.hard: data.path=data.jsonl holds questions, but",
    ),
    # models
    "no model": ([], "policy.model_path is not set: give a local checkpoint directory"),
    "a folder without a model": (["policy.model_path=empty"], "policy.model_path=empty holds no config.json: give"),
    "a file as the model": (["policy.model_path=broken.py"], "holds no config.json"),
    "a model that was not made": (
        ["experiment=smollm2"],
        "policy.model_path=models/smollm2-135m: no such folder (looked in {folder}): run `make smollm2`",
    ),
    "a path under models": (
        ["policy.model_path=models/mine"], "=models/mine: no such folder (looked in {folder})",
    ),
    "a relative path": (["policy.model_path=./mine"], "=./mine: no such folder (looked in {folder})"),
    "an absolute path": (["policy.model_path=/no/model"], "=/no/model: no such folder"),
    "a model of the hub": (
        ["policy.model_path=Qwen/Qwen2.5-0.5B-Instruct"],
        "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct on a machine that can",
    ),
    "no reference model": ([QUICKSTART, "reference.model_path=empty"], "reference.model_path=empty holds no config"),
    # devices and packages
    "heads too small for vLLM on a CPU": (
        [QUICKSTART, "actors.engine=vllm", "actors.device=cpu"], "set policy.tiny.num_heads=2",
    ),
    "a tiny model over two GPUs": (
        [QUICKSTART, "actors.engine=vllm", "policy.tiny.num_heads=3", "policy.tiny.hidden_size=96",
         "actors.vllm.tensor_parallel_size=2"],
        "does not divide the heads of the tiny model, which has 3 for queries and 3 for keys and values: set it to one",
    ),
    "no GPU for the learner": ([QUICKSTART, "run.device=cuda"], "0 are visible here: set run.device=cpu"),
    "no GPU for the actors": ([QUICKSTART, "actors.device=cuda"], "no GPU is visible here: set actors.device=cpu"),
    "no wandb": ([QUICKSTART, "tracking.wandb.enabled=true"], "pip install 'streamrl[track]'"),
    "unknown tracker": ([QUICKSTART, "tracking.trackers=[wandbb]"], "Did you mean wandb?"),
    "broadcast without a GPU": ([QUICKSTART, "publish.transports=[nccl,zmq]"], "take nccl off the list"),
    # the objective
    "unknown surrogate": ([QUICKSTART, "loss.surrogate=ppo_clop"], "Did you mean ppo_clip"),
    "unknown estimator": ([QUICKSTART, "advantage.estimator=gea"], "gae"),
    "two ratios": ([QUICKSTART, "advantage.estimator=clipped_is", "loss.surrogate=ppo_clip"], "leave one of them out"),
    "a kind of KL that is biased here": ([QUICKSTART, "kl.mode=k3"], "use k2_is (or k1_is, k3_is)"),
    "unknown optimizer": ([QUICKSTART, "policy.optimizer.name=adam"], "Did you mean adamw"),
    "no penalty to scale": ([QUICKSTART, "overlong.scale=2"], "does nothing without overlong.cache_ratio"),
    "one reward to combine": ([QUICKSTART, "objectives.scale_by_range=true"], "does nothing with objectives.combine"),
    "a shadow that needs a critic": ([QUICKSTART, "shadow.algorithms=[vtrace]"], "trains no such critic"),
    "no pass to limit": (
        [QUICKSTART, "algorithm=dr_grpo", "learner.max_inference_tokens_per_device=512"], "make no pass"),
    "an option that does nothing": ([QUICKSTART, "loss.ewma_decay=0.5"], "does nothing without loss.anchor=ewma"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a broken task, data and a folder without a model; no GPU, no extra packages."""
    files = {
        "broken": BROKEN, "hangs": HANGS, "math_task": MATH_VERIFY, "hidden_alarm": HIDDEN_ALARM, "calc": NO_ENV,
        "long": LONG, "no_target": NO_TARGET, "guess": GUESS, "syntax": "reward = (\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "data.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "system.jsonl").write_text(f"{json.dumps(SYSTEM)}\n" * 2)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = importlib.util.find_spec
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else found(name))
    return tmp_path


@pytest.fixture
def taken_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_starts(folder, name, taken_port):
    words, said = MISTAKES[name]
    words = [word.format(port=taken_port) if "{port}" in word else word for word in words]
    before = sorted(folder.iterdir())

    with pytest.raises(StreamrlError) as caught:
        check_run(load_config(words))

    assert said.replace("{folder}", str(folder)) in str(caught.value)
    assert ("hf download" in str(caught.value)) == ("hf download" in said)
    assert not re.search(r"(\(\w+\.py, line \d+\)).*\1", str(caught.value))  # a place in a file stands there once
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before  # Python's own


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fitting"),
    [
        (9, 3, 2, "1, 3, 9"), (32, 8, 3, "1, 2, 4, 8, 16, 32"), (64, 8, 5, "1, 2, 4, 8, 16, 32, 64"),
        (12, 8, 6, "1, 2, 4"), (9, 3, 3, None), (32, 8, 4, None), (32, 8, 16, None), (9, 3, 1, None), (14, 2, 2, None),
    ],
)
def test_heads_that_tensor_parallelism_cannot_divide_are_refused(folder, heads, kv_heads, size, fitting):
    settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (folder / "empty" / "config.json").write_text(json.dumps(settings))
    words = ["policy.model_path=empty", f"actors.vllm.tensor_parallel_size={size}", "run.device=cpu"]

    for engine in ("vllm", "native"):
        said = ""
        try:
            check_run(load_config([*words, f"actors.engine={engine}"]))
        except StreamrlError as error:
            said = str(error)
        expected = fitting is not None and engine == "vllm"
        assert ("does not divide the heads" in said) == expected
        assert not expected or (
            f"size={size} " in said and f"{heads} for queries and {kv_heads} for keys" in said
            and said.endswith(f"set it to one of {fitting}.")
        )
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("setting", ["distill.teacher", "policy.model_path", "reference.model_path"])
@pytest.mark.parametrize(("name", "says"), [
    ("runs/none@9", "no such run: 'runs/none' .*runs/ has one-1"), ("none@best", "no such run: 'none'"),
    ("none@best:hard", "no such run: 'none'"), ("owner/model@main", "no such folder"),
    ("runs/none", "no such folder"), ("a b/c", "cannot be a name of the model hub"),
])
def test_what_is_no_run_no_folder_and_no_name_of_the_hub_is_one_sentence(folder, monkeypatch, setting, name, says):
    monkeypatch.chdir(folder)
    (folder / "runs" / "one-1").mkdir(parents=True)
    (folder / "runs" / "one-1" / "run.json").write_text("{}")
    words = [f"{setting}={name}", *["policy.tiny.enabled=true"] * (setting != "policy.model_path")]
    with pytest.raises(ConfigError, match=f"{setting}={name}.*{says}"):
        config = load_config(words)
        find_models(models_of(config), notify=pytest.fail)
        model_config(name, setting=setting)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_a_model_in_the_cache_of_the_hub_is_taken_by_its_name(folder, tmp_path, monkeypatch, weights):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "models--my--model"
    snapshot = kept / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / weights).touch()
    config = load_config(["policy.model_path=my/model"])

    find_models(models_of(config), notify=pytest.fail)

    assert config.policy.model_path == str(snapshot)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.dir=taken"], "already holds a run: add checkpoint.resume=true"),
        (["checkpoint.resume=true"], "no run quickstart-*"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_before_the_settings_are_checked(folder, monkeypatch, words, said):
    (folder / "taken").mkdir()
    (folder / "taken" / "EPOCH").touch()
    monkeypatch.setattr("streamrl.launch.check_settings", lambda *_: pytest.fail("too late"))

    with pytest.raises(ConfigError, match=re.escape(said)):
        launch_run([QUICKSTART, *words])

    assert not (folder / "runs").exists()


def test_what_can_run_passes(folder):
    check_run(load_config([QUICKSTART]))


@pytest.mark.parametrize("name", ["missing task file", "text for a number", "a model of the hub"])
def test_launch_says_so_before_it_imports_torch_and_makes_no_run_directory(folder, tmp_path_factory, python_env, name):
    words, said = MISTAKES[name]
    refuses = tmp_path_factory.mktemp("path") / "torch.py"
    refuses.write_text("raise ImportError('torch takes seconds to import')")
    env = {**python_env, "PYTHONPATH": f"{refuses.parent}{os.pathsep}{python_env.get('PYTHONPATH', '')}"}

    done = subprocess.run([sys.executable, "-m", "streamrl.cli", "launch", *words], env=env, cwd=folder,
                          capture_output=True, text=True, timeout=60)

    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_that_the_rule_knows_can_be_made(name):
    from actors.engines.base import engine_factory

    assert callable(engine_factory(name))


@pytest.mark.parametrize("kept_in", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_a_model_without_a_chat_template_is_told_unless_that_is_meant(tmp_path, kept_in):
    make_tiny_model(tmp_path / "m", characters="abcdefghij0123456789 =+?", max_positions=512)
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "m" / "chat_template.jinja").unlink(missing_ok=True)

    def told(*words: str) -> bool:
        said: list[str] = []
        check_run(load_config([QUICKSTART, f"policy.model_path={tmp_path / 'm'}", *words]), notify=said.append)
        return any("the tokenizer has no chat template: contents are joined by line breaks" in text for text in said)

    assert told()
    assert not told("data.apply_chat_template=false")
    assert not told('data.chat_template="{{ messages }}"')
    with_template = {**settings, "chat_template": "{{ messages }}"} if kept_in == "tokenizer_config.json" else "{}"
    (tmp_path / "m" / kept_in).write_text(json.dumps(with_template))
    assert not told()
