"""docs/models.md says of each family what `python -m bench.families` found, which goes the whole way of a run."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.engines.native.engine import NativeEngine
from actors.engines.native.self_check import prepare as prepare_engine
from bench.families.cases import FAMILIES, FAST, MORE
from bench.families.page import PAGE, RESULTS, generated, read_lines
from learner.model.policy import load_policy, score_rows
from learner.model.scoring.self_check import NotExact
from learner.model.scoring.self_check import prepare as prepare_learner
from streamrl.architectures.attention import CAUSAL, MaskRule, attend, check_extras, keep_rule, rule_of
from streamrl.architectures.miniature import check_rows
from streamrl.architectures.refusals import REFUSED
from streamrl.architectures.rope import has_dynamic_rope, original_length
from streamrl.errors import ConfigError, EngineError
from tests.unit.engines.tiny_models import GREEDY, V1, document, request

pytestmark = pytest.mark.timeout(500)
NATIVE, VLLM = (read_lines(RESULTS / f"{engine}.jsonl") for engine in ("native", "vllm"))
ALWAYS = ("result", "reason", "embeddings", "buffers", "untrained", "lora")
"""Fields that are equal on every machine; differences of sums in another order are not."""


FEW = ("deepseek_v3", "gemma3_text")
"""Of `FAST`: experts and saved buffers, windows and norms."""


def test_a_family_goes_the_whole_way(tmp_path):
    assert_as_committed(FEW, tmp_path)


def test_the_other_families_do_what_the_page_says_too(tmp_path):
    assert_as_committed([one for one in (*FAST, *MORE) if one not in FEW], tmp_path)


def assert_as_committed(families: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", "bench.families", "--only", ",".join(families), "--out", str(folder / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, cwd=PAGE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_lines(folder / "out.jsonl")
    for family in families:
        for key in ALWAYS:
            assert found[family].get(key) == NATIVE[family].get(key), (family, key)


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


RULES = {
    "causal": (causal_mask_function, None),
    "window": (sliding_window_causal_mask_function(5), 5),
    "chunks": (chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64)), 5),
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("length", [3, 5, 6, 13])
def test_a_rule_hides_what_the_mask_of_transformers_hides(kind, length):
    function, size = RULES[kind]
    rule = keep_rule(mask_function=function, local_size=size, allow_is_causal_skip=True)
    expected = sdpa_mask(
        batch_size=1, q_length=length, kv_length=length, mask_function=function, allow_is_causal_skip=False,
    )[0, 0]

    assert torch.equal(rule.square(length, torch.device("cpu")), expected)
    assert rule.is_causal(length) == torch.equal(expected, torch.ones_like(expected).tril())
    assert torch.equal(rule.visible(torch.tensor([[2], [length - 1]]), torch.arange(length)), expected[[2, length - 1]])


def test_only_a_window_is_a_window():
    windows = {
        kind: keep_rule(mask_function=function, local_size=size, allow_is_causal_skip=True).window
        for kind, (function, size) in RULES.items()
    }
    assert windows == {"causal": None, "window": 5, "chunks": None}
    assert keep_rule(mask_function=RULES["window"][0], local_size=5, allow_is_causal_skip=False).window is None


def test_a_mask_that_a_model_makes_itself_is_refused_and_none_is_causal():
    module = torch.nn.Identity()
    assert rule_of(module, None) is CAUSAL
    assert isinstance(rule_of(module, keep_rule()), MaskRule)
    with pytest.raises(ValueError, match="a mask of its own making"):
        rule_of(module, torch.zeros(1, 1, 3, 3))
    module.is_causal = False
    with pytest.raises(ValueError, match="no mask and is not causal"):
        rule_of(module, None)
    with pytest.raises(ValueError, match="by `position_bias`"):
        check_extras(module, {"position_bias": torch.zeros(1), "softcap": 3.0})


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("form", ["causal", "bool", "additive"])
def test_attention_is_the_softmax_of_capped_scores_and_sinks(softcap, with_sinks, form):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    sinks = torch.randn(4) if with_sinks else None
    visible = torch.ones(7, 7).tril().bool()
    if form != "causal":
        visible &= ~torch.ones(7, 7).tril(-3).bool()
    mask = {"causal": None, "bool": visible, "additive": torch.zeros(7, 7).masked_fill(~visible, float("-inf"))}[form]

    out = attend(query, key, value, mask=mask, scaling=0.4, softcap=softcap, sinks=sinks)

    for head in range(4):
        scores = 0.4 * query[:, head] @ key[:, head // 2].transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        powers = scores.exp() * visible
        total = powers.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[head].exp())
        torch.testing.assert_close(out[:, head], powers / total @ value[:, head // 2], atol=1e-5, rtol=1e-4)


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
