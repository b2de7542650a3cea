"""A setting that is a text has the text that was typed, though YAML and hydra read another value in it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from streamrl.config.catalog import PATHS, settings, texts
from streamrl.config.load import from_plain, load_config, to_plain, to_yaml
from streamrl.config.overrides import parse_overrides, read_files
from streamrl.errors import ConfigError
from streamrl.sweep.words import parse_sweep

TYPED = ("1e5", "true", "False", "0x10", "1_000", "1.50", "inf", "007", "-3", "on", "1:30", "2026-11-28")
KINDS = {name: kind for name, kind, _, _ in settings()}
LISTS = {name for name in texts() if KINDS[name].startswith("list[str]")}


def values_of(words):
    return dict(parse_overrides(words))


def test_every_setting_of_type_text_is_known():
    walked = {
        name for name, kind in KINDS.items()
        if ("str" in kind.split("|") and "bool" not in kind) or kind.startswith("list[str]")
    }
    assert texts() == walked | set(PATHS) and len(walked) > 70


@pytest.mark.parametrize("text", TYPED)
def test_a_text_stays_as_it_was_typed_in_words_in_files_and_over_other_settings(tmp_path, text):
    words = [f"{name}=[{text},x,'{text}']" if name in LISTS else f"{name}={text}" for name in sorted(texts())]
    wanted = {name: [text, "x", text] if name in LISTS else text for name in texts()}
    assert values_of(words) == wanted

    typed = OmegaConf.create({})
    for name in texts():
        OmegaConf.update(typed, name, f"<{name}>")
    file = tmp_path / "mine.yaml"
    lines = OmegaConf.to_yaml(typed)
    for name in texts():
        value = f"[{text}, x, '{text}']" if name in LISTS else text
        lines = lines.replace(f"<{name}>", value)
    file.write_text(lines)
    assert values_of(read_files([str(file)])) == wanted


@pytest.mark.parametrize("text", TYPED)
def test_a_sweep_varies_texts_as_they_were_typed(text):
    for name in texts() - LISTS:
        for several in (f"{text},x", f"choice({text},x)"):
            axis = parse_sweep([f"{name}={several}"]).axes[name]
            assert [values_of([f"{name}={value}"])[name] for value in axis.values] == [text, "x"]


@pytest.mark.parametrize("text", TYPED)
def test_a_run_has_the_text_and_so_has_one_that_reads_its_settings_again(tmp_path, text):
    given = [f"{key}={text}" for key in ("run.root", "policy.model_path", "data.path")]
    given += [f"rollout.train.sampling.stop=[{text}]", "reward.type=exact"]
    config = load_config(["experiment=quickstart", *given])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    on_top = from_plain(to_plain(load_config(["experiment=quickstart"])), given)
    for one in (config, load_config([str(file)]), on_top):
        assert one.run.root == one.policy.model_path == one.data.path == text
        assert one.rollout.train.sampling.stop == [text]


def test_null_is_none_where_the_setting_may_have_none_and_is_refused_elsewhere():
    assert load_config(["experiment=quickstart", "run.dir=null"]).run.dir is None
    with pytest.raises(ConfigError, match="run.name"):
        load_config(["experiment=quickstart", "run.name=null"])
    with pytest.raises(ConfigError, match="must be a list"):
        load_config(["experiment=quickstart", "env.tools=5"])


NAMES = st.text("aé~()[]{}=#@;&!%^|<>?*+'\"$ .:/-", max_size=8).map(lambda middle: f"a{middle}z.jsonl")
TEXTUAL = [name for name, kind, _, _ in settings() if kind.startswith(("Any", "list[str]", "str"))]


@given(name=NAMES, key=st.sampled_from(TEXTUAL))
@example(name="~/x.jsonl", key="data.path")
def test_what_begins_with_no_bracket_is_a_text_as_it_was_typed(name, key):
    assert parse_overrides([f"{key}={name}"]) == [(key, name)]


@given(names=st.lists(NAMES.filter(lambda name: not set(name) & set("'\"[](){}")), min_size=1, max_size=3))
def test_so_is_each_name_of_a_list(names):
    names = [name.strip() for name in names]
    assert parse_overrides([f"data.path=[{','.join(names)}]"]) == [("data.path", names)]
