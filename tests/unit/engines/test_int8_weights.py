"""Weights rounded to int8 at install: log-probs are those of the rounded model, and the probe compares them alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from actors.engines.native.weights import linear_weights, round_to_int8_
from actors.settings import engine_spec
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from tests.unit.actors.fakes import V1 as PUBLISHED
from tests.unit.actors.test_probe import ProbedWeights, installed
from tests.unit.engines.tiny_models import document, engine_for, llama, prompt_of, qwen3, request, run, truth_logprobs

pytestmark = pytest.mark.timeout(60)


def transcription(weight: torch.Tensor) -> torch.Tensor:
    rows = []
    for row in weight.tolist():
        scale = max(map(abs, row)) / 127
        rows.append([round(value / scale) * scale if scale else value for value in row])
    return torch.tensor(rows)


def test_a_matrix_is_rounded_as_int8_with_a_scale_for_each_row():
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    rounded = weight.clone()
    round_to_int8_(rounded)
    torch.testing.assert_close(rounded, transcription(weight), atol=1e-6, rtol=1e-6)
    assert max(len(row.unique()) for row in rounded) <= 255 and (rounded - weight).abs().max() > 1e-4
    again = rounded.clone()
    round_to_int8_(again)
    torch.testing.assert_close(again, rounded, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [qwen3, llama])
def test_an_int8_engine_samples_from_the_rounded_model_and_installs_again(make):
    model = make()
    rounded = copy.deepcopy(model)
    names = linear_weights(rounded)
    assert len(names) == 2 * 7 and not any("head" in name or "embed" in name for name in names)
    with torch.no_grad():
        for name in names:
            rounded.get_parameter(name).copy_(transcription(model.get_parameter(name)))

    async def check():
        async with engine_for(model, weights="int8") as engine:
            for _ in range(2):  # the second install fills the spare tensors
                prompt = prompt_of(9)
                found = await engine.generate(request(prompt, 12))
                expected = truth_logprobs(rounded, prompt, found.token_ids)
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=1e-4)
                full = truth_logprobs(model, prompt, found.token_ids)
                assert 1e-3 < float((expected - full).abs().max()) < 0.5
                await engine.install(document(model), PUBLISHED)

    run(check)


@pytest.mark.parametrize(("tolerance", "passes"), [(0.3, True), (1e-4, False)])
def test_the_probe_compares_log_probs_and_no_bits(tolerance, passes):
    model = qwen3()

    async def check():
        async with engine_for(model, weights="int8", install=False) as engine:
            _, report = await installed(engine, ProbedWeights(model, tolerance=tolerance))
            assert report.ok and (report.probe.failed == "") is passes
            assert passes or "log-probs of the probe differ" in report.probe.failed

    run(check)


@pytest.mark.shows("actors.weights")
def test_the_setting_reaches_the_engine_and_is_refused_for_another(tmp_path):
    for value in ("full", "int8"):
        config = load_config(["experiment=quickstart", f"actors.weights={value}"])
        assert engine_spec(config, tmp_path, SimpleNamespace()).weights == value
    with pytest.raises(ConfigError, match="actors.weights=int8 is rounded by the native engine alone"):
        load_config(["experiment=quickstart", "actors.weights=int8", "actors.engine=vllm"])
