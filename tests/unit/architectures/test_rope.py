"""Rotary frequencies that depend on length: fixed for the run, and then every row of a pass is exact."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig

from actors.engines.native.engine import NativeEngine
from learner.model.policy import load_policy, score_rows
from streamrl.architectures.miniature import check_rows
from streamrl.architectures.rope import has_dynamic_rope, original_length
from streamrl.errors import ConfigError, EngineError
from tests.unit.engines.tiny_models import GREEDY, V1, document, request

pytestmark = pytest.mark.timeout(60)
ORIGINAL = 32
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [2.0, 4.0, 7.0, 9.0],
        "original_max_position_embeddings": ORIGINAL, "rope_theta": 100.0}
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "max_position_embeddings": 128}


def phi3():
    return Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=dict(LONG))



def saved(config, path):
    """A checkpoint with attention that is far from uniform, so that frequencies matter."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return model


def eager_logprobs(model, rows):
    return torch.cat([
        model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        for row in rows
    ]).detach()


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(ORIGINAL, (32, 9, 20)), (100, (60, 33, 47))], ids=["within", "beyond"]
)
def test_longrope_rows_of_different_length_share_a_pass_of_the_learner(tmp_path, max_tokens, lengths):
    model, rows = saved(phi3(), tmp_path), check_rows(61, lengths)
    policy = load_policy(tmp_path, max_tokens=max_tokens)

    scored = score_rows(policy.model, policy.rule, rows)

    torch.testing.assert_close(scored.detach(), eager_logprobs(model, rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("max_tokens", "prompts"), [(ORIGINAL, (5, 14)), (100, (34, 45))], ids=["within", "beyond"])
def test_what_the_engine_records_of_a_longrope_model_is_what_the_learner_scores(tmp_path, max_tokens, prompts):
    model = saved(phi3(), tmp_path)
    rows = [row.tolist() for row in check_rows(61, prompts)]

    async def work():
        engine = NativeEngine(
            AutoModelForCausalLM.from_pretrained(tmp_path), None, max_num_seqs=2, max_tokens=max_tokens
        )
        await engine.install(document(model), V1)
        sampled = await asyncio.gather(*(engine.generate(request(row, 16, seed=i)) for i, row in enumerate(rows)))
        greedy = await asyncio.gather(*(engine.generate(request(row, 16, sampling=GREEDY)) for row in rows))
        await engine.close()
        return sampled, greedy

    sampled, greedy = asyncio.run(work())
    policy = load_policy(tmp_path, max_tokens=max_tokens)
    whole = [torch.tensor([*row, *done.token_ids]) for row, done in zip(rows, sampled, strict=True)]
    scored = score_rows(policy.model, policy.rule, whole).detach().split([len(row) - 1 for row in whole])
    for part, done in zip(scored, sampled, strict=True):
        torch.testing.assert_close(part[-16:], torch.tensor(done.logprobs), atol=1e-4, rtol=1e-4)
    for row, done in zip(rows, greedy, strict=True):
        ids = list(row)
        for _ in range(16):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert done.token_ids == ids[len(row):]


def test_one_choice_holds_for_rows_on_both_sides_of_the_original_length(tmp_path):
    """As in vLLM: a run that may pass the original length has the long factors from the first token on."""
    saved(phi3(), tmp_path)
    short, long = check_rows(61, (9, 60))
    policy = load_policy(tmp_path, max_tokens=100)

    together = score_rows(policy.model, policy.rule, [short, long])
    alone = score_rows(policy.model, policy.rule, [short])
    prefix = score_rows(policy.model, policy.rule, [long[:20]])

    torch.testing.assert_close(together[:8], alone)
    torch.testing.assert_close(together[8:27], prefix)


def test_dynamic_ntk_is_exact_within_the_original_length_and_refused_beyond(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    model = saved(LlamaConfig(**{**SIZES, "max_position_embeddings": ORIGINAL}, rope_parameters=rope), tmp_path)
    rows = check_rows(61, (32, 9, 20))
    policy = load_policy(tmp_path, max_tokens=ORIGINAL)

    scored = score_rows(policy.model, policy.rule, rows)

    torch.testing.assert_close(scored.detach(), eager_logprobs(model, rows), atol=1e-4, rtol=1e-4)
    assert (original_length(model.config), has_dynamic_rope(model.config)) == (ORIGINAL, True)
    with pytest.raises(ConfigError, match="dynamic.*beyond 32 tokens.*allows 33.*rope_type"):
        load_policy(tmp_path, max_tokens=33)


def test_phimoe_is_refused_beyond_the_original_length_by_learner_and_engine(tmp_path):
    """transformers keeps the short factors there and scales by the long ones; vLLM takes the long factors."""
    rope = {**LONG, "short_mscale": 1.1, "long_mscale": 1.3}
    config = PhimoeConfig(
        **SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=rope, num_local_experts=4
    )
    model = saved(config, tmp_path)
    rows = check_rows(61, (32, 9, 20))

    policy = load_policy(tmp_path, max_tokens=ORIGINAL)

    scored = score_rows(policy.model, policy.rule, rows)
    torch.testing.assert_close(scored.detach(), eager_logprobs(model, rows), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="phimoe.*beyond 32 tokens"):
        load_policy(tmp_path, max_tokens=100)
    with pytest.raises(EngineError, match="phimoe.*beyond 32 tokens"):
        NativeEngine(model, None, max_num_seqs=1, max_tokens=100)
