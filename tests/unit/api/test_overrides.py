"""Settings given as keyword arguments reach the configuration as they are, or are refused with one sentence."""

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.api.overrides import words_of
from streamrl.config.load import load_config
from streamrl.errors import ConfigError

texts = st.text(alphabet=st.one_of(st.sampled_from("'\"\\{}[](),:=$ \n\tab1~#%?*"), st.characters(codec="utf-8")))
texts = texts.filter(lambda text: "${" not in text and text != "???")
keys = st.from_regex(r"[A-Za-z_][A-Za-z_0-9-]{0,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2**40, 2**40) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12,
)
BASE = ["experiment=quickstart"]
few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(many=st.lists(values | texts, min_size=40, max_size=60))
def test_every_plain_value_arrives_as_it_is(many):
    many += ["abc\\", "it's", "\\'", "a\\\\'b", "it's {a: 1, a: 2}", "null", "1", "", " x ", "[1,2", "a\nb"]
    config = load_config([*BASE, *words_of({"env__path": "mine.py", "env__options": {"given": many}})])
    assert config.env.options == {"given": many}


@few
@given(text=texts)
def test_every_text_is_the_settings_text(text):
    assert load_config([*BASE, *words_of({"data__system_prompt": text})]).data.system_prompt == text


@pytest.mark.parametrize(("given_value", "wanted"), [
    (7, 7), (None, None), ([1.5, 2.0], [1.5, 2.0]), ((3.0, 1.0), [3.0, 1.0]),
])
def test_values_of_typed_settings(given_value, wanted):
    key = "data__num_samples" if not isinstance(given_value, list | tuple) else "data__weights"
    more = {"data__path": ["a.jsonl", "b.jsonl"], "env__path": Path("reward.py")}
    config = load_config([*BASE, *words_of({**more, key: given_value})])
    assert getattr(config.data, key.removeprefix("data__")) == wanted
    assert config.env.path == "reward.py" and config.data.path == ["a.jsonl", "b.jsonl"]


def test_a_section_a_group_and_an_array_scalar():
    numpy = pytest.importorskip("numpy")
    config = load_config(words_of({"experiment": "quickstart", "algorithm": "dr_grpo", "trainer": {"num_steps": 5},
                                   "policy__optimizer__lr": numpy.float32(0.5)}))
    assert config.trainer.num_steps == 5 and config.policy.optimizer.lr == 0.5
    assert config.loss.avg_level == "seq-mean-token-sum-norm"


@pytest.mark.parametrize(("key", "meant"), [
    ("num_steps", "trainer__num_steps"), ("trainer__num_step", "trainer__num_steps"),
    ("learning_rate", "policy__optimizer__lr"), ("max_steps", "trainer__num_steps"),
    ("num_generations", "rollout__num_responses_per_prompt"), ("model_path", "policy__model_path"),
])
def test_an_unknown_key_is_answered_with_the_nearest_as_python_writes_it(key, meant):
    with pytest.raises(ConfigError, match=rf"Unknown key `{key}`: did you mean {meant}=\.\.\.\?"):
        words_of({key: 1})


@pytest.mark.parametrize(("value", "why"), [
    (object(), "is a object"), (lambda: 0, "is a function"), ("${run.name}", "cannot hold"), ("???", "cannot hold"),
    ({1: 2}, "the key 1"), ([{"a b": 1}], "the key 'a b'"), (math, "is a module"),
])
def test_a_value_that_no_setting_can_have_is_named(value, why):
    with pytest.raises(ConfigError, match=f"env__options.*{why}"):
        words_of({"env__options": value})
