"""The public names of vLLM that the engine stands on: one test each, so that a moved one fails by its name."""

from __future__ import annotations

import pytest

from actors.engines.vllm import imports as vllm_names
from streamrl.errors import EngineError
from tests.unit.engines.vllm_harness import NEEDS_VLLM

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("name", vllm_names.NAMES)
def test_vllm_has_it_with_the_parameters_that_are_used(name: str):
    assert vllm_names.moved(name, vllm_names.NAMES[name]) is None


def test_what_moved_is_named_with_its_version(monkeypatch):
    vllm_names.check_names()
    monkeypatch.setitem(vllm_names.NAMES, "vllm.v1.engine.async_llm:AsyncLLM.pause_generation", ("mode", "gently"))
    monkeypatch.setitem(vllm_names.NAMES, "vllm.config:set_other_config", ())

    with pytest.raises(EngineError, match="pause_generation takes no gently.*set_other_config") as caught:
        vllm_names.check_names()

    assert vllm_names.vllm().version in str(caught.value)
