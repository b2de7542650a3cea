"""Defaults that follow the machine, with a program named nvidia-smi in place of GPUs and stand-ins for packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from actors.settings import local_settings, settings_here
from learner import __main__ as learner_main
from learner.fit.by_device import choose, plan
from learner.fit.estimate import GIB
from learner.fit.models import config_of_model
from streamrl.cli import launch as launch_command
from streamrl.config.devices import Choice
from streamrl.config.load import load_config, load_run_config, load_with_choices, to_plain, to_yaml
from streamrl.errors import ConfigError
from streamrl.launch import launch_run
from tests.unit.config.setting_harness import config_of

SIZES = dict(
    model_type="qwen3", vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
)
MODEL = ["policy.model_path=somewhere"]
TRANSPORTS = ("publish.transports", "actors.transports")
PLANNED = {
    "rollout.train.sampling.max_new_tokens", "learner.max_tokens_per_device", "policy.gradient_checkpointing",
    "actors.num_concurrent",
}


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable[..., None]:
    """Makes this machine one with so many GPUs of so many MiB, and with these packages of `vllm` and `cupy`."""
    folder = tmp_path / "fake-bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(gpus: int, *installed: str, mib: int = 81559) -> None:
        lines = "".join(f"{n}, GPU-{n}, {mib}, {mib}\\n" for n in range(gpus))
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        program.chmod(0o755)
        util = SimpleNamespace(find_spec=lambda name: object() if name in installed else None)
        monkeypatch.setattr("streamrl.config.devices.importlib", SimpleNamespace(util=util))

    return make


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


def values(choices: list[Choice]) -> dict[str, object]:
    return {one.key: one.value for one in choices}


@pytest.mark.shows("publish.transports", "actors.transports", "actors.engine")
@pytest.mark.parametrize(
    ("gpus", "installed", "words", "engine", "transports", "why"),
    [
        (0, ["vllm", "cupy"], MODEL, "native", ["shm", "zmq"], ""),
        (1, ["vllm", "cupy"], MODEL, "vllm", ["shm", "zmq"], "vLLM maps versions in shared memory"),
        (8, ["vllm", "cupy"], MODEL, "vllm", ["shm", "zmq"], "vLLM maps versions in shared memory"),
        (1, [], MODEL, "native", ["ipc", "shm", "zmq"], "learner and actors share GPU 0"),
        (8, ["cupy"], MODEL, "native", ["nccl", "shm", "zmq"], "learner and actors have GPUs of their own"),
        (8, [], MODEL, "native", ["shm", "zmq"], "nccl needs cupy"),
        (1, ["vllm"], ["experiment=quickstart"], "native", ["ipc", "shm", "zmq"], "share GPU 0"),
        (8, ["cupy"], [*MODEL, "actors.device=cpu"], "native", ["shm", "zmq"], ""),
        (8, ["cupy"], [*MODEL, "run.device=cpu"], "native", ["shm", "zmq"], ""),
        (8, ["cupy"], [*MODEL, "actors.engine=my:engine"], "my:engine", ["shm", "zmq"], "an engine of your own"),
    ],
)
def test_engine_and_transports_follow_the_gpus_and_what_is_installed(
    machine, gpus, installed, words, engine, transports, why
):
    machine(gpus, *installed)
    loaded = load_with_choices(words)

    config = loaded.config
    assert (config.actors.engine, config.publish.transports, config.actors.transports) == (
        engine, transports, transports
    )
    reasons = [one.why for one in loaded.choices if one.key in TRANSPORTS]
    assert len(reasons) == 2 * bool(why) and all(why in one for one in reasons)


@pytest.mark.parametrize(
    ("words", "publish", "actors"),
    [
        (["publish.transports=[zmq]"], ["zmq"], ["shm", "zmq"]),
        (["actors.transports=[zmq]"], ["shm", "zmq"], ["zmq"]),
        (["publish.transports=[nccl,zmq]"], ["nccl", "zmq"], ["nccl", "shm", "zmq"]),
        (["publish.transports=auto", "actors.transports=auto"], ["nccl", "shm", "zmq"], ["nccl", "shm", "zmq"]),
    ],
)
def test_transports_that_are_named_are_kept_and_the_other_side_follows(machine, words, publish, actors):
    machine(8, "cupy")
    config = load_config([*MODEL, *words])
    assert (config.publish.transports, config.actors.transports) == (publish, actors)
    with pytest.raises(ConfigError, match="unknown transports \\['auto'\\]"):
        load_config([*MODEL, "publish.transports=[auto,zmq]"])


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_strangers_launch_names_vllm_and_the_transports(machine, tmp_path, monkeypatch, capsys, gpus):
    machine(gpus, "vllm", "cupy")
    assert launch_command([*MODEL, "--cfg", "job"]) == 0

    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)
    assert (shown["actors"]["engine"], shown["publish"]["transports"]) == ("vllm", ["shm", "zmq"])
    assert printed.splitlines()[-1].startswith("# chosen for the GPU when the run starts: rollout.train.sampling.max_n")
    assert "max_tokens_per_device" not in shown["learner"] and "num_concurrent" not in shown["actors"]
    (tmp_path / "run.yaml").write_text(printed)
    assert {*load_with_choices([str(tmp_path / "run.yaml")]).open} == PLANNED  # the same run, as a file


def test_without_a_gpu_nothing_is_left_open_and_every_default_stands(machine):
    machine(0, "vllm", "cupy")
    loaded = load_with_choices(MODEL)
    assert (loaded.choices, loaded.open) == ([], [])
    config = loaded.config
    assert (config.rollout.train.sampling.max_new_tokens, config.learner.max_tokens_per_device) == (64, 4096)
    assert (config.policy.gradient_checkpointing, config.actors.num_concurrent) == (False, 64)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], set()),
        (["learner.max_tokens_per_device=4096"], {"learner.max_tokens_per_device"}),
        (["rollout.train.sampling.max_new_tokens=64", "actors={num_concurrent: 9}"],
         {"rollout.train.sampling.max_new_tokens", "actors.num_concurrent"}),
        (["experiment=smollm2"], {"rollout.train.sampling.max_new_tokens"}),
        (["actors.engine=native"], {"actors.num_concurrent"}),
        (["run.device=cpu"], PLANNED),
        (["policy.model_path=null", "policy.tiny.enabled=true"], PLANNED),
    ],
)
def test_what_an_experiment_a_file_or_a_word_gives_is_not_open(machine, words, given):
    machine(1, "vllm")
    assert {*load_with_choices([*MODEL, *words]).open} == PLANNED - given


@pytest.mark.shows("rollout.train.sampling.max_new_tokens", "learner.max_tokens_per_device")
def test_the_planner_takes_the_longest_answers_and_the_largest_step_that_fit(machine, model):
    machine(1, "vllm")
    loaded = load_with_choices([f"policy.model_path={model}"])
    read = config_of_model(str(model))

    roomy = values(plan(loaded, read, limit=80 * GIB, engine=40 * GIB))
    assert roomy == {
        "rollout.train.sampling.max_new_tokens": 4096 - 1024, "learner.max_tokens_per_device": 16384,
        "policy.gradient_checkpointing": False, "actors.num_concurrent": 256,
    }
    tight = values(plan(loaded, read, limit=0, engine=0))  # nothing fits: the smallest of all
    assert tight == {
        "rollout.train.sampling.max_new_tokens": 2048 - 1024, "learner.max_tokens_per_device": 2048,
        "policy.gradient_checkpointing": True, "actors.num_concurrent": 64,
    }
    asked = values(plan(replace(loaded, open=["policy.gradient_checkpointing"]), read, limit=0, engine=0))
    assert asked == {"policy.gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("words", "new_tokens"),
    [
        (["learner.max_tokens_per_device=1500"], 1500 - 1024),
        (["env.max_turns=3"], (4096 - 1024) // 3),
        (["rollout.train.sampling.top_p=0.9"], 1111),  # ids of 64 answers that vLLM holds for each token
        (["rollout.max_prompt_tokens=4060", "learner.max_tokens_per_device=8192"], 64),  # a model without more room
    ],
)
def test_answers_end_where_a_row_the_model_or_the_engine_ends(machine, model, words, new_tokens):
    machine(1, "vllm")
    loaded = load_with_choices([f"policy.model_path={model}", *words])
    found = plan(loaded, config_of_model(str(model)), limit=80 * GIB, engine=40 * GIB)
    assert values(found)["rollout.train.sampling.max_new_tokens"] == new_tokens
    assert load_config([f"policy.model_path={model}", *words, *(one.word for one in found)])  # every rule holds


def test_transports_that_the_device_refuses_or_has_no_room_for_are_left_out_with_a_reason(machine, model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine(1)
    loaded = load_with_choices([f"policy.model_path={model}"])
    found = [one for one in choose(loaded, torch.device("cpu"), print) if one.key in TRANSPORTS]
    assert values(found) == dict.fromkeys(TRANSPORTS, ["shm", "zmq"])
    assert all("no CUDA device is visible" in one.why for one in found)

    machine(1, mib=6000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    loaded = load_with_choices([f"policy.model_path={model}"])  # of the GPU an engine has a quarter
    found = [one for one in choose(loaded, torch.device("cuda"), print) if one.key in TRANSPORTS]
    assert values(found) == dict.fromkeys(TRANSPORTS, ["shm", "zmq"]) and "3 copies of the weights" in found[0].why
    machine(1)
    loaded = load_with_choices([f"policy.model_path={model}"])
    assert TRANSPORTS[0] not in values(choose(loaded, torch.device("cuda"), print))
    assert loaded.config.publish.transports == ["ipc", "shm", "zmq"]
    assert loaded.config.learner.max_tokens_per_device == 16384  # the config has what was chosen


def test_launch_tells_what_was_chosen_and_every_process_and_the_record_have_it(here, machine, monkeypatch, capsys):
    machine(1, "cupy")
    (here / "hub-please").write_text("1")
    planned = [Choice("learner.max_tokens_per_device", 9000, "a reason"), Choice("policy.gradient_checkpointing", True,
                                                                                 "a reason")]
    asked: list[list[str]] = []
    monkeypatch.setattr("streamrl.launch.check_settings", lambda config, words, caller: asked.append(words) or planned)
    words = [*MODEL, f"run.dir={here / 'run'}", "launch.num_actors=1"]
    launch_run(words)

    printed = capsys.readouterr().out
    assert printed.count("chosen for this machine") == 1 and asked == [words] and " idle: " not in printed
    assert "  learner.max_tokens_per_device=9000 policy.gradient_checkpointing=true: a reason\n" in printed
    assert "  publish.transports=[ipc,shm,zmq] actors.transports=[ipc,shm,zmq]: learner and actors share" in printed
    learner, = (path.read_text() for path in here.glob("learner-*"))
    for word in ("actors.engine=native", "publish.transports=[ipc,shm,zmq]", "learner.max_tokens_per_device=9000"):
        assert word in learner and word in (here / "run" / "run.json").read_text()  # what `streamrl resume` repeats
    actor, = (path.read_text() for path in here.glob("actor-*"))
    assert "actors.engine=native" in actor and "actors.transports=[ipc,shm,zmq]" in actor

    (here / "run" / "config.yaml").write_text(to_yaml(load_config([*MODEL, "learner.max_tokens_per_device=7000"])))
    planned.clear()
    machine(8, "cupy")
    launch_run([*words, "checkpoint.resume=true"])  # the sizes with which the run began
    assert "learner.max_tokens_per_device=7000" in asked[-1]
    printed = capsys.readouterr().out
    assert "learner.max_tokens_per_device=7000" in printed
    assert "GPUs: learner 0, actor-0 1; 6 idle: streamrl fit somewhere --gpus 8 proposes ranks and actors" in printed
    assert load_run_config(here / "run").learner.max_tokens_per_device == 7000


def test_a_learner_without_launcher_chooses_for_itself_and_tells(machine, model, monkeypatch):
    machine(1, "vllm")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    told: list[str] = []
    config = learner_main.settled([f"policy.model_path={model}"], told.append)
    assert config.learner.max_tokens_per_device == 16384 and config.rollout.train.sampling.max_new_tokens == 3072
    assert any("actors.engine=vllm: it is installed" in line for line in told)
    told.clear()
    words = [f"{key}={value}" for key, value in {
        "actors.engine": "native", "publish.transports": "[zmq]", "actors.transports": "[zmq]",
        "rollout.train.sampling.max_new_tokens": 64, "learner.max_tokens_per_device": 4096,
        "policy.gradient_checkpointing": "false",
    }.items()]
    assert learner_main.settled([f"policy.model_path={model}", *words], told.append).actors.num_concurrent == 64
    assert told == []


def test_an_actor_that_joins_takes_the_engine_and_the_transports_that_it_can_have(machine, monkeypatch):
    machine(0)
    told = to_plain(config_of("actors.engine=vllm", "actors.num_concurrent=200"))
    found = {"vllm": None}
    util = SimpleNamespace(find_spec=lambda name: found[name])
    monkeypatch.setattr("actors.settings.importlib", SimpleNamespace(util=util))
    for own, engine, num in (([], "native", 64), (["actors.engine=vllm"], "vllm", 200), (["actors.engine=auto"],
                                                                                        "native", 200)):
        config = settings_here(told, own)
        assert (config.actors.engine, config.actors.num_concurrent) == (engine, num)
    found["vllm"] = object()
    assert settings_here(told, []).actors.engine == "vllm"

    assert local_settings([]).actors.transports == ["shm", "zmq"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("streamrl.weights.gpu.nccl.require_nccl", lambda device: None)
    assert local_settings([]).actors.transports == ["ipc", "nccl", "shm", "zmq"]
    assert local_settings(["actors.transports=auto", "actors.device=cpu"]).actors.transports == ["shm", "zmq"]
    assert local_settings(["actors.transports=[zmq]"]).actors.transports == ["zmq"]

    def no_cupy(device: str) -> None:
        raise ConfigError("no cupy")

    monkeypatch.setattr("streamrl.weights.gpu.nccl.require_nccl", no_cupy)
    assert local_settings([]).actors.transports == ["ipc", "shm", "zmq"]
