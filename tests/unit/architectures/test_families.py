"""docs/models.md says of each family what `python -m bench.families` found, which goes the whole way of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.engines.native.self_check import prepare as prepare_engine
from bench.families.cases import FAMILIES, FAST, MORE
from bench.families.page import PAGE, RESULTS, generated, read_lines
from learner.model.policy import score_rows
from learner.model.scoring.self_check import NotExact
from learner.model.scoring.self_check import prepare as prepare_learner
from streamrl.architectures.refusals import REFUSED
from streamrl.errors import EngineError

pytestmark = pytest.mark.timeout(500)
NATIVE, VLLM = (read_lines(RESULTS / f"{engine}.jsonl") for engine in ("native", "vllm"))
ALWAYS = ("result", "reason", "embeddings", "buffers", "untrained", "lora")
"""Fields that are equal on every machine; differences of sums in another order are not."""


@pytest.fixture(scope="module")
def fast(tmp_path_factory, request) -> dict[str, dict]:
    return by_the_command(FAST, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> dict[str, dict]:
    return by_the_command(MORE, tmp_path_factory.mktemp("families"))


def by_the_command(families: tuple[str, ...], folder: Path) -> dict[str, dict]:
    command = [sys.executable, "-m", "bench.families", "--only", ",".join(families), "--out", str(folder / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, cwd=PAGE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    return read_lines(folder / "out.jsonl")


@pytest.mark.parametrize("family", FAST)
def test_a_family_goes_the_whole_way(family, fast):
    assert_as_committed(fast[family], NATIVE[family])


@pytest.mark.parametrize("family", MORE)
def test_a_family_that_is_built_like_others_does_what_the_page_says_too(family, more):
    assert_as_committed(more[family], NATIVE[family])


def assert_as_committed(found: dict, committed: dict) -> None:
    assert {key: found.get(key) for key in ALWAYS} == {key: committed.get(key) for key in ALWAYS}


def test_the_page_is_what_was_found():
    assert PAGE.read_text().endswith("\n\n" + generated(NATIVE, VLLM)), "run: python -m bench.families.page"


def test_every_family_of_the_installed_transformers_was_gone_through_and_none_fails_after_the_start():
    assert set(NATIVE) == set(FAMILIES) and set(VLLM) <= set(FAMILIES)
    assert {line["transformers"] for line in (*NATIVE.values(), *VLLM.values())} == {transformers.__version__}
    assert [name for made in (NATIVE, VLLM) for name, line in made.items() if line["result"] == "failed"] == []


def test_a_family_is_refused_by_name_only_if_transformers_has_it():
    assert set(REFUSED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", ["bloom", "roberta", "bart", "jamba", "doge", "qwen3_next"])
def test_a_refused_family_is_refused_by_name_by_learner_and_engine(model_type):
    config = CONFIG_MAPPING[model_type]()
    built = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = SimpleNamespace(config=config, _can_set_attn_implementation=built._can_set_attn_implementation)

    with pytest.raises(NotExact, match=rf"{model_type} .*docs/models.md"):
        prepare_learner(model, score_rows, max_tokens=None)
    with pytest.raises(EngineError, match=rf"{model_type} .*docs/models.md"):
        prepare_engine(model, max_tokens=64)
