"""A settings file on the command line: below the words beside it, above the defaults."""

from __future__ import annotations

from itertools import pairwise

import pytest

from streamrl.config.load import load_config, to_plain, to_yaml
from streamrl.config.overrides import read_files
from streamrl.errors import ConfigError
from streamrl.sweep.words import parse_sweep

MINE = """
experiment: quickstart
trainer: {num_steps: 7}
policy:
  optimizer: {lr: 3e-5}
rollout: {train: {sampling: {stop: ["\\n", "it's", 'a\\b']}}}
env: {options: {max_length: 5}}
filter: {accuracy_range: null}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(MINE)
    return tmp_path


def test_a_file_stands_between_the_defaults_and_the_words(folder):
    config = load_config(["my.yaml", "trainer.num_steps=8"])

    assert config.run.name == "quickstart" and config.policy.tiny.enabled
    assert (config.trainer.num_steps, config.policy.optimizer.lr) == (8, 3e-5)
    assert config.rollout.train.sampling.stop == ["\n", "it's", "a\\b"]
    assert config.env.options == {"max_length": 5} and config.filter.accuracy_range is None


@pytest.mark.parametrize("experiment", ["quickstart", "smollm2"])
def test_the_config_that_a_run_wrote_can_be_given_back(folder, experiment):
    (folder / "runs" / "one").mkdir(parents=True)
    file = folder / "runs" / "one" / "config.yaml"
    first = load_config([f"experiment={experiment}", "run.dir=runs/one", "policy.optimizer.lr=1e-5",
                         "rollout.train.sampling.stop=['a b']", "checkpoint.resume=true"])
    file.write_text(to_yaml(first))

    again = load_config([str(file)])

    assert again.run.dir is None and not again.checkpoint.resume, "a new run, in a directory of its own"
    again.run.dir, again.checkpoint.resume = "runs/one", True
    assert to_plain(again) == to_plain(first)


def test_a_word_replaces_what_the_file_says_otherwise(folder):
    assert not load_config(["my.yaml", "policy.model_path=somewhere"]).policy.tiny.enabled
    assert load_config(["my.yaml", "env.name=string.sort"]).env.options == {}
    assert load_config(["my.yaml", "experiment=smollm2"]).run.name == "smollm2"


LAUGHS = "env:\n  options:\n    a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LAUGHS, "aliases mean more than 100000 values"),
        (LAUGHS.replace("[", "{k: [").replace("]", "]}"), "aliases mean more than 100000 values"),
        ("env: {options: &a {b: *a}}\n", "aliases mean more than 100000 values"),
        ("env: {options: {a: " + "[" * 5000 + "]" * 5000 + "}}\n", "recursion"),
        ("# " + "x" * 1_000_001, "more than 1000000 characters"),
    ],
    ids=["lists", "mappings", "itself", "nested", "long"],
)
def test_a_file_that_means_more_than_any_settings_is_refused_at_once(folder, text, why):
    (folder / "bad.yaml").write_text(text)

    with pytest.raises(ConfigError, match=why):
        load_config(["bad.yaml"])


def test_aliases_are_read(folder):
    (folder / "twice.yaml").write_text("env: {options: {a: &a [1, 2], b: *a}}\n")
    assert read_files(["twice.yaml"]) == ["env.options.a=[1,2]", "env.options.b=[1,2]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {num_step: 3}", "bad.yaml: Unknown key `trainer.num_step`: did you mean `trainer.num_steps`"),
        ("- a\n- b\n", "bad.yaml holds no settings"),
        ("a: [1\n", "bad.yaml cannot be read as settings"),
        (None, "bad.yaml: no such settings file"),
    ],
)
def test_a_file_that_says_nothing_is_refused_by_name(folder, text, message):
    if text is not None:
        (folder / "bad.yaml").write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_config(["bad.yaml"])
    assert message in str(caught.value)


def test_a_sweep_takes_a_file_too(folder):
    words = parse_sweep(read_files(["my.yaml", "staleness.eta=0,2", "sweep.dir=out"]))

    assert words.grid() == [("staleness.eta=0",), ("staleness.eta=2",)]
    for swept in words.grid():
        config = load_config([*words.fixed, *swept])
        assert config.rollout.train.sampling.stop == ["\n", "it's", "a\\b"] and config.sweep.dir == "out"
