"""Defaults that follow the machine, with a program named nvidia-smi in place of GPUs and stand-ins for packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from actors.settings import local_settings, settings_here
from learner import __main__ as learner_main
from learner.fit import by_device
from learner.fit.by_device import choose, plan, why_not_compiled
from learner.fit.estimate import GIB, WORKING, num_parameters
from learner.fit.models import config_of_model
from streamrl.architectures.decode_graphs import graph_bytes
from streamrl.cli import launch as launch_command
from streamrl.config.devices import PLANNED, Choice
from streamrl.config.load import from_plain, load_config, load_with_choices, to_plain, to_yaml
from streamrl.launch import launch_run
from tests.unit.config.setting_harness import config_of
from tests.unit.learner.test_fit import SMALL

MODEL = ["policy.model_path=somewhere"]
TRANSPORTS = ("publish.transports", "actors.transports")


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
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SMALL, "max_position_embeddings": 4096}))
    return folder


def values(choices: list[Choice]) -> dict[str, object]:
    return {one.key: one.value for one in choices}


@pytest.mark.shows("publish.transports", "actors.transports", "actors.engine")
@pytest.mark.parametrize(
    ("gpus", "installed", "words", "engine", "transports", "why"),
    [
        (0, ["vllm", "cupy"], MODEL, "native", ["shm", "zmq"], ""),
        (1, ["vllm"], ["experiment=quickstart"], "native", ["ipc", "shm", "zmq"], "share GPU 0"),
        (1, ["vllm", "cupy"], MODEL, "vllm", ["shm", "zmq"], "vLLM maps versions in shared memory"),
        (8, ["vllm", "cupy"], MODEL, "vllm", ["shm", "zmq"], "vLLM maps versions in shared memory"),
        (1, [], MODEL, "native", ["ipc", "shm", "zmq"], "learner and actors share GPU 0"),
        (8, ["cupy"], MODEL, "native", ["nccl", "shm", "zmq"], "learner and actors have GPUs of their own"),
        (8, [], MODEL, "native", ["shm", "zmq"], "nccl needs cupy"),
        (8, ["vllm", "cupy"], [*MODEL, "actors.weights=int8"], "native", ["nccl", "shm", "zmq"], "GPUs of their own"),
        (8, ["cupy"], [*MODEL, "run.device=cpu"], "native", ["shm", "zmq"], ""),
        (8, ["cupy"], [*MODEL, "actors.engine=my:engine"], "my:engine", ["shm", "zmq"], "an engine of your own"),
        (8, ["vllm", "cupy"], [*MODEL, "actors.engine=native"], "native", ["nccl", "shm", "zmq"], "GPUs of their own"),
        (8, ["vllm", "cupy"], [*MODEL, "actors.device=cpu"], "native", ["shm", "zmq"], ""),
    ],
)
def test_engine_and_transports_follow_the_gpus_and_what_is_installed(
    machine, gpus, installed, words, engine, transports, why
):
    machine(gpus, *installed)
    loaded = load_with_choices(words)
    assert loaded.config.actors.engine == engine
    assert loaded.config.publish.transports == loaded.config.actors.transports == transports
    reasons = [one.why for one in loaded.choices if one.key in TRANSPORTS]
    assert len(reasons) == 2 * bool(why) and all(why in one for one in reasons)
    leaves_a_choice = gpus and not any(word.startswith(("actors.engine=", "actors.device=")) for word in words)
    assert ("actors.engine" in values(loaded.choices)) == bool(leaves_a_choice)
    assert gpus or (loaded.choices, loaded.open) == ([], [])


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_strangers_launch_names_vllm_and_the_transports(machine, tmp_path, monkeypatch, capsys, gpus):
    machine(gpus, "vllm", "cupy")
    assert launch_command([*MODEL, "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)
    assert (shown["actors"]["engine"], shown["publish"]["transports"]) == ("vllm", ["shm", "zmq"])
    assert printed.splitlines()[-1].startswith("# chosen for the GPU when the run starts: rollout.train.sampling.max_n")
    (tmp_path / "run.yaml").write_text(printed)
    assert {*load_with_choices([str(tmp_path / "run.yaml")]).open} == {*PLANNED}  # the same run, as a file


def test_what_an_experiment_or_a_word_gives_is_not_open(machine):
    machine(1, "vllm")
    assert load_with_choices(["experiment=smollm2", "actors={num_concurrent: 9}"]).open == [*PLANNED[1:4]]


@pytest.mark.shows("rollout.train.sampling.max_new_tokens", "learner.max_tokens_per_device")
def test_the_planner_takes_the_longest_answers_and_the_largest_step_that_fit(machine, model):
    machine(1, "vllm")
    loaded = load_with_choices([f"policy.model_path={model}"])
    read = config_of_model(str(model))
    roomy = values(plan(loaded, read, limit=80 * GIB, engine=40 * GIB))
    assert roomy == {
        "rollout.train.sampling.max_new_tokens": 4096 - 1024, "learner.max_tokens_per_device": 16384,
        "policy.gradient_checkpointing": False, "learner.compile": True, "actors.num_concurrent": 256,
    }
    assert values(plan(loaded, read, limit=0, engine=0))["policy.gradient_checkpointing"] is True  # the smallest of all


@pytest.mark.shows("learner.compile")
def test_layers_are_compiled_where_a_small_function_is(machine, model, monkeypatch):
    machine(1)
    loaded, eager = load_with_choices([f"policy.model_path={model}"]), partial(torch.compile, backend="eager")
    with monkeypatch.context() as compiles:
        compiles.setattr("torch.compile", eager)
        assert why_not_compiled(loaded.config.learner, torch.device("cpu")) == ""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # it is not: the function cannot be compiled
    found = {one.key: one for one in choose(loaded, torch.device("cuda"), print)}["learner.compile"]
    assert not found.value and not loaded.config.learner.compile and "nothing compiles on cuda (" in found.why
    loaded.config.learner.mesh.tensor = 2
    assert "learner.mesh.tensor" in why_not_compiled(loaded.config.learner, torch.device("cpu"))


def test_answers_end_where_a_row_or_the_engine_ends(machine, model):
    machine(1, "vllm")
    for word, most in (("learner.max_tokens_per_device=1500", 1500 - 1024), ("rollout.train.sampling.top_p=0.9", 1111)):
        loaded = load_with_choices([f"policy.model_path={model}", word])
        found = plan(loaded, config_of_model(str(model)), limit=80 * GIB, engine=40 * GIB)
        assert values(found)["rollout.train.sampling.max_new_tokens"] == most


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


def test_graphs_of_the_native_engine_count_where_its_gpu_has_to_hold_documents(machine, model, monkeypatch):
    machine(1)
    shape, refusals = config_of_model(str(model)), []
    room = 3 * 2 * num_parameters(shape) + WORKING + graph_bytes(shape, 64, 1024)
    for words in ((), ("actors.num_concurrent=128",), ("rollout.train.sampling.max_new_tokens=3000",)):
        sizes = "actors.num_concurrent=64", "rollout.max_prompt_tokens=24", "rollout.train.sampling.max_new_tokens=1000"
        loaded = load_with_choices([f"policy.model_path={model}", "actors.engine=native", *sizes, *words])
        refusals.append(bool(by_device._no_room(loaded, shape, room)))
        loaded.config.actors.engine = "vllm"
        assert not by_device._no_room(loaded, shape, room)
    assert refusals == [False, True, True]


def test_launch_tells_what_was_chosen_and_every_process_and_the_record_have_it(here, machine, monkeypatch, capsys):
    machine(1, "cupy")
    (here / "hub-please").write_text("1")
    planned = [Choice("learner.max_tokens_per_device", 9000, "a reason")]
    asked: list[list[str]] = []
    monkeypatch.setattr("streamrl.launch.check_settings", lambda config, words, caller: asked.append(words) or planned)
    words = [*MODEL, f"run.dir={here / 'run'}", "launch.num_actors=1"]
    launch_run(words)
    printed = capsys.readouterr().out
    assert printed.count("chosen for this machine") == 1 and asked == [words] and " idle: " not in printed
    assert "  learner.max_tokens_per_device=9000: a reason\n" in printed
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
    assert "GPUs: learner 0, actor-0 1; 6 idle: streamrl fit somewhere --gpus 8" in capsys.readouterr().out


def test_a_learner_without_launcher_chooses_for_itself_and_tells(machine, model, monkeypatch):
    machine(1, "vllm")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    told: list[str] = []
    config = learner_main.settled([f"policy.model_path={model}"], told.append)
    assert config.learner.max_tokens_per_device == 16384 and config.rollout.train.sampling.max_new_tokens == 3072
    assert any("actors.engine=vllm: it is installed" in line for line in told)


def test_an_actor_says_in_hello_the_engine_of_its_own_word_and_a_run_keeps_its_engine(machine):
    machine(2, "vllm")
    assert local_settings([]).actors.engine == "native"
    assert local_settings(["actors.engine=auto"]).actors.engine == "vllm"  # what its own word means here
    told = to_plain(load_config(MODEL))
    machine(0)
    assert from_plain(told).actors.engine == "vllm"  # what a stored run or a hub says
    assert local_settings(["actors.engine=auto"]).actors.engine == "native"


def test_an_actor_that_joins_takes_the_engine_and_the_transports_that_it_can_have(machine, monkeypatch):
    machine(0)
    told = to_plain(config_of("actors.engine=vllm", "actors.num_concurrent=200"))
    found = {"vllm": None}
    util = SimpleNamespace(find_spec=lambda name: found[name])
    monkeypatch.setattr("actors.settings.importlib", SimpleNamespace(util=util))
    config = settings_here(told, [])
    assert (config.actors.engine, config.actors.num_concurrent) == ("native", 64)
    assert settings_here(told, ["actors.engine=vllm"]).actors.engine == "vllm"
    found["vllm"] = object()
    assert settings_here(told, []).actors.engine == "vllm"
    assert local_settings([]).actors.transports == ["shm", "zmq"] and local_settings([]).actors.engine == "native"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("streamrl.weights.gpu.nccl.require_nccl", lambda device: None)
    assert local_settings([]).actors.transports == ["ipc", "nccl", "shm", "zmq"]
    assert local_settings(["actors.transports=auto", "actors.device=cpu"]).actors.transports == ["shm", "zmq"]
    assert local_settings(["actors.transports=[zmq]"]).actors.transports == ["zmq"]


@pytest.mark.parametrize(("words", "tolerance"), [
    ([], 0.1), (["actors.weights=int8"], 0.5), (["actors.weights=int8", "publish.probe_tolerance=0.2"], 0.2),
])
def test_actors_that_round_their_weights_may_differ_by_more(words, tolerance):
    assert load_config(["experiment=quickstart", *words]).publish.probe_tolerance == tolerance
