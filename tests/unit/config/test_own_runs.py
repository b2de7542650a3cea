"""The settings of a run directory: this user's own as they are, others' as far as the words name what they use."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shlex
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path

import pytest
import yaml

import streamrl
from streamrl.config.catalog import settings
from streamrl.config.composition import CONFIGS
from streamrl.config.load import (
    HERE,
    TRAINS,
    load_config,
    load_run_config,
    run_settings,
    settings_then,
    to_plain,
    to_yaml,
)
from streamrl.config.overrides import check_words, leaves, literal
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, ControlError
from streamrl.named_code import ALWAYS, DATA_ONLY, OPTIONS, is_name, is_own, named_code, sign
from streamrl.run_dirs import note_start
from streamrl.verbs.resume import command_of
from streamrl.verbs.runs import find_run

ROOT = Path(__file__).parents[3]
TEXT = re.compile(r"Any|dict\[.*\]|(str|list\[str\])(\|null)?")
NO_TEXT = re.compile(r"(int|float|bool|list\[(float|int)\])(\|null)?|[a-z0-9_]+(\|[a-z0-9_]+)+")
REFUSED = "is not signed as a run of yours, and asks for"


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """A run that somebody else has made, with a task of theirs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = tmp_path / "runs" / "one-001"
    made.mkdir(parents=True)
    (made / "config.yaml").write_text(to_yaml(load_config(["experiment=quickstart", "env.path=task.py"])))
    return made


def texts() -> list[str]:
    """Every setting that can hold a text."""
    kinds = {name: kind for name, kind, _, _ in settings()}
    assert all(TEXT.fullmatch(kind) or NO_TEXT.fullmatch(kind) for kind in kinds.values()), kinds
    return [name for name, kind in kinds.items() if TEXT.fullmatch(kind)]


@pytest.mark.parametrize("setting", texts())
def test_every_text_of_the_settings_is_a_name_or_stated_as_data(setting):
    if setting in DATA_ONLY:
        assert not is_name(setting, "evil:run")
    elif setting not in ("env.tasks", "eval.datasets"):  # sections by a name of the user's
        *sections, last = setting.split(".")
        nested: object = {last: "evil:run"}
        for section in reversed(sections):
            nested = {section: nested}
        assert list(named_code(nested)) == [(setting, "evil:run")]
    assert setting.endswith("_env") <= is_name(setting, "SECRET")


def test_what_is_stated_of_settings_is_of_settings_that_there_are():
    assert {*DATA_ONLY, *ALWAYS, *OPTIONS} <= {*texts()}


def calls() -> dict[str, str]:
    """Settings whose texts become objects or programs, by the places in the code where that is done."""
    found = {}
    for package in ("streamrl", "envs", "learner", "actors"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                    "resolve", "resolve_function", "import_attribute", "run_file", "find_surrogate", "find_estimator",
                    "load_transport",
                ):
                    named = [word.value for word in node.keywords if word.arg == "setting"]
                    found |= {str(one.value): str(file) for one in named if isinstance(one, ast.Constant)}
    return found


def test_every_name_that_the_code_resolves_is_one():
    assert len(calls()) > 10 and [name for name in calls() if not is_name(name, "evil:run")] == []


FORMS = {
    "plain": "env: {name: 'evil:run'}", "dotted": "'env.name': 'evil:run'", "added": "'++env.name': 'evil:run'",
    "twice": "{env: {options: {a: {b: 'evil:run'}}}, 'env.options.a': {}}",
    "an alias": "data: {system_prompt: &a 'evil:run'}\nenv: {name: *a}",
    "a key": "reward: {weights: {'evil:run': 1.0}}\ndata: {path: x.jsonl}", "in a list": "env: {tools: ['evil:run']}",
    "a task": "env: {tasks: {one: {reward: {type: 'evil:run'}}}}\ndata: {path: x.jsonl}",
    "a task's dotted": "env: {tasks: {one: {'env.name': 'evil:run'}}}\ndata: {path: x.jsonl}",
    "a set": "eval: {datasets: {one: {path: x.jsonl, reward: {type: 'evil:run'}}}}",
    "a set's tasks": "eval: {datasets: {one: {env: {tasks: {two: {env: {name: 'evil:run'}}}}}}}",
    "options": "env: {options: {deep: [{er: 'evil:run'}]}}", "vllm": "actors: {vllm: {worker_cls: 'evil:run'}}",
    "it allows itself": "actors: {allow: ['evil:run']}\nenv: {name: 'evil:run'}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", [load_run_config, lambda run: load_config([str(run / "config.yaml")])])
def test_a_name_is_found_however_it_is_written(form, read, run_dir):
    (run_dir / "config.yaml").write_text(FORMS[form])
    (run_dir / "run_id").write_text("theirs")
    with pytest.raises(ConfigError, match=rf"{REFUSED} .*evil:run.* add 'actors\.allow="):
        read(run_dir)


def test_a_directory_that_is_no_text_is_refused(run_dir):
    (run_dir / "config.yaml").write_text("run: {dir: [1]}")
    with pytest.raises(ConfigError, match=r"run\.dir"):
        load_run_config(run_dir)


@pytest.mark.parametrize("word", [
    "experiment={}", "algorithm='{}'", "+experiment@_global_={}", "algorithm=[grpo,{}]",
])
def test_no_run_chooses_a_file_outside_of_its_group(word, run_dir):
    (run_dir / "evil.yaml").write_text("# @package _global_\nenv: {path: evil.py}\n")
    outside = word.format(os.path.relpath(run_dir / "evil", CONFIGS / "experiment"))

    with pytest.raises(ConfigError, match=r"evil is unknown\. Choose from"):
        load_config([*check_words([outside], [], "the run"), "policy.tiny.enabled=true"])


def test_no_file_of_a_run_does_either(run_dir):
    (run_dir / "evil.yaml").write_text("# @package _global_\nenv: {path: evil.py}\n")
    (run_dir / "config.yaml").write_text(f"experiment: {os.path.relpath(run_dir / 'evil', CONFIGS / 'experiment')}\n")
    with pytest.raises(ConfigError, match=r"evil is unknown\. Choose from"):
        load_run_config(run_dir, ["policy.tiny.enabled=true"])


@pytest.mark.parametrize("text", ["hydra: {searchpath: ['pkg://evil']}", "hydra: {run: {dir: x}}"])
def test_no_run_configures_the_library_that_reads_settings(text, run_dir):
    (run_dir / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"hydra\.(searchpath|run\.dir)"):
        load_run_config(run_dir)


@pytest.mark.parametrize("words", [
    ["actors.allow=[task.py]"], ["env.path=task.py"], ["env.path=./task.py"], ["env.name=string.copy"],
])
def test_what_the_words_name_or_replace_may_be_used(words, run_dir, monkeypatch):
    monkeypatch.chdir(run_dir)
    with pytest.raises(ConfigError, match=REFUSED):
        load_run_config(run_dir, ["run.name=task.py"])
    assert load_run_config(run_dir, words).actors.allow == (["task.py"] if "allow" in words[0] else [])


def test_a_run_of_this_user_needs_no_words_until_its_settings_are_changed(run_dir):
    file = run_dir / "config.yaml"
    sign(file)
    assert load_run_config(run_dir).env.path == "task.py" and is_own(file)

    file.write_text(file.read_text().replace("task.py", "other.py"))
    with pytest.raises(ConfigError, match=REFUSED):
        load_run_config(run_dir)


def test_a_function_that_was_written_beside_the_settings_is_signed_with_them(run_dir):
    (run_dir / "inputs").mkdir()
    (run_dir / "inputs" / "reward.py").write_text("def reward_fn(completion): return 1.0\n")
    sign(run_dir / "config.yaml")
    assert is_own(run_dir / "config.yaml")

    (run_dir / "inputs" / "reward.py").write_text("raise SystemExit\n")
    assert not is_own(run_dir / "config.yaml")


def test_the_key_is_this_users_alone_and_no_other_signature_counts(run_dir, tmp_path, monkeypatch):
    file, key = run_dir / "config.yaml", tmp_path / "state" / "streamrl" / "signing.key"
    sign(file)
    assert key.stat().st_mode & 0o777 == 0o600 and key.parent.stat().st_mode & 0o777 == 0o700

    key.chmod(0o644)  # others may have read it
    assert not is_own(file)
    key.chmod(0o600)
    assert is_own(file)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert not is_own(file)


def test_a_key_is_made_where_the_file_system_has_no_hard_links(run_dir, tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError("not supported")

    monkeypatch.setattr("os.link", link)
    sign(run_dir / "config.yaml")
    assert is_own(run_dir / "config.yaml")
    assert [one.name for one in (tmp_path / "state" / "streamrl").iterdir()] == ["signing.key"]


def test_where_there_is_no_place_for_a_key_nothing_is_signed(run_dir, tmp_path, monkeypatch):
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a_file"))
    sign(run_dir / "config.yaml")
    note_start(run_dir, ["streamrl", "launch", "env.path=task.py"])
    assert not list(run_dir.glob("*.signature")) and not is_own(run_dir / "run.json")


def test_a_resumed_run_takes_its_own_words_and_no_others(run_dir, tmp_path, monkeypatch):
    note_start(run_dir, ["streamrl", "launch", "env.path=task.py"])
    assert command_of(find_run(str(run_dir)), [])[:2] == ["launch", "env.path=task.py"]

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match=REFUSED):
        command_of(find_run(str(run_dir)), [])
    with pytest.raises(ConfigError, match=REFUSED):
        streamrl.resume(str(run_dir))
    assert "env.path=mine.py" in command_of(find_run(str(run_dir)), ["env.path=mine.py"])
    assert "env.path=task.py" in command_of(find_run(str(run_dir)), ["actors.allow=[task.py]"])


@pytest.mark.parametrize("word", [
    r"env.name=$\{data.system_prompt\}", r"env.name=str($\{data.system_prompt\})", r"data.answer_key=$\{oc.env\:HOME\}",
    r"env.tools=[$\{data.system_prompt\}]", r"reward.weights={$\{data.system_prompt\}: 1.0}",
    "env.name=${data.system_prompt}",
])
def test_no_reference_of_a_command_is_hidden_by_backslashes(word, run_dir):
    command = ["streamrl", "launch", "experiment=quickstart", "data.system_prompt='evil:run'", word]
    (run_dir / "run.json").write_text(json.dumps({"starts": [{"command": shlex.join(command)}]}))
    with pytest.raises(ConfigError, match=r"hold the reference .*\$\{"):
        command_of(find_run(str(run_dir)), [])


def test_a_command_that_cannot_be_read_says_what_to_do(run_dir):
    (run_dir / "run.json").write_text(json.dumps({"starts": [{"command": "streamrl launch 'x"}]}))
    with pytest.raises(ControlError, match="does not say how the run was started"):
        command_of(find_run(str(run_dir)), [])


@pytest.mark.parametrize("key", ["actors.allow", "++actors.allow", "actors"])
def test_no_run_allows_itself_what_another_one_names(key, run_dir):
    value = {"allow": ["evil:run"]} if key == "actors" else ["evil:run"]
    (run_dir / "config.yaml").write_text(json.dumps({key: value, "policy": {"model_path": "other-001@1"}}))
    assert load_run_config(run_dir).actors.allow == []

    word = f"{key}={literal(value)}"
    command = ["streamrl", "launch", "experiment=quickstart", word]
    (run_dir / "run.json").write_text(json.dumps({"starts": [{"command": shlex.join(command)}]}))
    assert command_of(find_run(str(run_dir)), [])[1:2] == ["experiment=quickstart"]
    assert "evil" not in " ".join(command_of(find_run(str(run_dir)), []))

    (run_dir / "more.yaml").write_text(json.dumps({key: value}))
    command = shlex.join(["streamrl", "launch", str(run_dir / "more.yaml")])
    (run_dir / "run.json").write_text(json.dumps({"starts": [{"command": command}]}))
    with pytest.raises(ConfigError, match=r"sets actors\.allow, which permits code"):
        command_of(find_run(str(run_dir)), [])


def test_settings_that_are_only_read_are_not_refused_and_nothing_of_them_is_resolved(run_dir, monkeypatch):
    assert run_settings(run_dir).env.path == "task.py"

    monkeypatch.setenv("SECRET", "hunter2")
    (run_dir / "config.yaml").write_text("data: {system_prompt: '${oc.env:SECRET}'}")
    for read in (run_settings, load_run_config):
        with pytest.raises(ConfigError, match=r"hold the reference .*\$\{oc.env:SECRET\}"):
            read(run_dir)


def test_the_settings_that_ship_name_nothing():
    for group in ("experiment", "algorithm"):
        for file in (ROOT / "configs" / group).glob("*.yaml"):
            assert list(named_code(yaml.safe_load(file.read_text()))) == []
    assert list(named_code(to_plain(Config()))) == []


def test_a_reward_of_ones_own_with_a_weight_is_read_back(run_dir):
    words = ["experiment=quickstart", "data.path=x.jsonl", r"reward.weights={my.rewards\:short: 0.5, exact: 1.0}"]
    (run_dir / "config.yaml").write_text(to_yaml(load_config(words)))
    sign(run_dir / "config.yaml")
    assert load_run_config(run_dir).reward.weights == {"my.rewards:short": 0.5, "exact": 1.0}


def test_what_trained_is_as_the_log_says_and_all_else_as_it_is_now():
    now, draw = load_config(["experiment=quickstart"]), random.Random(6)
    plain = dict(leaves(to_plain(now)))
    numbers = {
        key: value + 1 if type(value) is int else value * 0.9 for key, value in plain.items()
        if type(value) is int or type(value) is float and value
    }
    trains = [key for key in numbers if key.split(".")[0] in TRAINS and not key.startswith(HERE)]
    keep = draw.sample(trains, 5)
    then = json.loads(json.dumps(to_plain(now)))
    for key, value in numbers.items():
        *path, last = key.split(".")
        reduce(getitem, path, then)[last] = value
    found = dict(leaves(to_plain(settings_then(now, then, keep, "the log"))))

    assert found == plain | {key: numbers[key] for key in trains if key not in keep} and len(trains) > 60


@pytest.mark.parametrize(("key", "value"), [
    ("loss.surrogate", "theirs:loss"), ("policy.optimizer.name", "theirs:Sgd"), ("critic.model_path", "${oc.env:HOME}"),
])
def test_a_log_names_no_code_that_the_run_of_now_does_not(key, value):
    then = to_plain(load_config(["experiment=quickstart"]))
    section, last = key.split(".", 1)
    reduce(getitem, last.split(".")[:-1], then[section])[last.split(".")[-1]] = value
    with pytest.raises(ConfigError, match="theirs:" if "theirs" in value else "oc.env"):
        settings_then(load_config(["experiment=quickstart"]), then, (), "the log")
    if "theirs" in value:
        allowed = load_config(["experiment=quickstart", f'actors.allow=["{value}"]'])
        assert attrgetter(key)(settings_then(allowed, then, (), "the log")) == value
