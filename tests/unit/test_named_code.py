"""A hub that names code, files and secrets of an actor's machine: nothing is used that its own words do not allow."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.runtime import build_runtime, weight_source
from actors.settings import local_settings
from envs.registry import load_task
from streamrl.config.load import to_plain
from streamrl.errors import ConfigError, TaskError
from streamrl.named_code import words_for_actors
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model

ROOT = Path(__file__).parents[2]
HOSTILE = {
    "env.name": ["env.name=evil:run"],
    "env.path": ["env.path={folder}/evil.py"],
    "env.tools": ["env.tools=[calculator,'evil:run']", "env.max_turns=2"],
    "env.tool_use.parser": ["env.tools=[calculator]", "env.tool_use.parser=evil:run", "env.max_turns=2"],
    "reward.type": ["data.path=x.jsonl", "reward.type=evil:run"],
    "reward.weights": ["data.path=x.jsonl", r"reward.weights={evil\:run:1.0}"],
    "reward.judge.api_key_env": ["data.path=x.jsonl", "reward.type=judge", "reward.judge.api_key_env=SECRET"],
    "reward.model.api_key_env": ["data.path=x.jsonl", "reward.type=model", "reward.model.api_key_env=SECRET"],
    "actors.endpoint.admin_key_env": ["actors.endpoint.admin_key_env=SECRET"],
    "actors.engine": ["actors.engine=evil:run"],
    "actors.transports": ["actors.transports=['evil:run',zmq]"],
    "actors.vllm": ["actors.vllm.worker_cls=evil.run"],
    "env.tasks.own.env.path": ["env.tasks.own.env.path={folder}/evil.py"],
    "env.tasks.own.reward.type": ["env.tasks.own={reward: {type: 'evil:run'}}"],
    "eval.datasets.own.env.name": ["eval.datasets.own.env.name=evil:run"],
    "eval.datasets.own.env.path": ["eval.datasets.own.env.path={folder}/evil.py"],
    "eval.datasets.own.reward.type": ["eval.datasets.own={path: x.jsonl, reward: {type: 'evil:run'}}"],
}
EVIL = "open({mark!r}, 'a').write('ran')\ndef run(*a, **k): raise RuntimeError('called')\nrecord = reward = run\n"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LiveHub(tmp_path_factory.mktemp("run"), config_of()) as live:
        live.publish(0, tiny_model(tmp_path_factory.mktemp("model")))
        yield live


@pytest.fixture
def build(hub, tmp_path, monkeypatch) -> Callable[..., None]:
    """build(learner's words, own words) as an actor does that joined a real hub; `mark` is what evil code leaves."""
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("evil", None)
    welcome = hub.connect().join()

    def one(words: list[str], own: list[str]) -> None:
        settings = to_plain(config_of(*(word.replace("{folder}", str(tmp_path)) for word in words)))
        told = msgspec.structs.replace(welcome, task=json.dumps(settings).encode())
        runtime = build_runtime(told, own, weight_source(local_settings(own).actors, hub.context)[0])
        asyncio.run(runtime.close())

    return one


@pytest.mark.timeout(60)
@pytest.mark.parametrize("setting", HOSTILE)
def test_what_a_hub_names_is_not_imported_unless_the_actors_own_words_allow_it(setting, build, tmp_path):
    with pytest.raises(ConfigError, match=f"the hub asks for {setting}=.* start the actor with .?actors.allow="):
        build(HOSTILE[setting], [])

    assert not (tmp_path / "mark").exists() and "evil" not in sys.modules


@pytest.mark.timeout(60)
@pytest.mark.shows("actors.allow")
@pytest.mark.parametrize("own", ["actors.allow=[evil:run]", "env.name=evil:run"])
def test_what_the_actors_own_words_name_is_imported(own, build, tmp_path):
    with pytest.raises(TaskError, match="called"):
        build(HOSTILE["env.name"], [own])

    assert (tmp_path / "mark").read_text() == "ran"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("setting", HOSTILE)
def test_a_launcher_allows_its_actors_what_its_own_settings_name(setting, build, tmp_path):
    settings = to_plain(config_of(*(word.replace("{folder}", str(tmp_path)) for word in HOSTILE[setting])))
    (word,) = words_for_actors(settings)
    try:
        build(HOSTILE[setting], [word])
    except Exception as error:  # evil code is no task, and there is no data
        assert "the hub asks for" not in str(error)
    assert words_for_actors(to_plain(config_of())) == []


@pytest.mark.timeout(60)
def test_a_file_is_the_same_however_it_is_written(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(HOSTILE["env.path"], ["actors.allow=[evil.py]"])
    assert (tmp_path / "mark").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${env.name}"])
def test_a_hub_cannot_refer_to_what_this_machine_knows(text, hub):
    welcome, settings = hub.connect().join(), to_plain(config_of())
    settings["data"]["system_prompt"] = f"say {text}"
    told = msgspec.structs.replace(welcome, task=json.dumps(settings).encode())
    with pytest.raises(ConfigError, match="the hub's settings hold the reference"):
        build_runtime(told, [], weight_source(local_settings([]).actors, hub.context)[0])


@pytest.mark.timeout(110)
def test_a_real_actor_of_a_hostile_hub_calls_nothing_and_says_why(tmp_path):
    mark = tmp_path / "mark"
    settings = to_plain(config_of())
    settings["env"] |= {"name": "subprocess:check_call", "options": {"args": ["touch", str(mark)]}}
    (tmp_path / "run").mkdir()
    with LiveHub(tmp_path / "run", config_of()) as live:
        told = msgspec.structs.replace(live.server.context.settings, welcome_task=json.dumps(settings))
        live.server.context.settings = told
        live.publish(0, tiny_model(tmp_path))
        done = subprocess.run(
            [sys.executable, "-m", "actors", f"connect={live.server.endpoint}"], capture_output=True, text=True,
            timeout=100, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    assert done.returncode == 2 and not mark.exists(), done.stderr
    assert "the hub asks for env.name=subprocess:check_call" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["subprocess:Popen", "collections:OrderedDict"])
def test_a_class_is_called_only_if_it_is_a_task(name):
    with pytest.raises(TaskError, match="is a class without num_records and record and env, not a task"):
        load_task(name, options={"args": ["true"]})
