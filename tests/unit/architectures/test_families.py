"""Every family that docs/models.md calls exact, on a miniature against eager transformers, one row at a time.

Rows that begin alike give the same with their beginning packed once.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.engines.base import GenerateRequest
from actors.engines.native.attention import ATTENTION_NAME
from actors.engines.native.forward import Forward
from actors.engines.native.scheduler import Scheduler, Sequence
from actors.engines.native.self_check import prepare as prepare_engine
from learner.model.attention.packed import ATTENTION
from learner.model.policy import score_rows, score_shared
from learner.model.scoring.self_check import NotExact
from learner.model.scoring.self_check import prepare as prepare_learner
from streamrl.architectures.miniature import build_miniature, check_rows
from streamrl.architectures.refusals import REFUSED
from streamrl.errors import EngineError
from streamrl.messages import Sampling, VersionRef
from tests.unit.architectures.families import EXACT, PAGE, config_of, table

pytestmark = pytest.mark.timeout(120)
LENGTHS, NEW_TOKENS = (26, 7, 15), 10
GRADIENT = {"gemma3n_text": 5e-3}  # its activations are cut at a threshold, which rounding can cross
MOST_GRADIENT, MOST_LOGPROB = 2e-5, 5e-5


DISTINCT = (
    "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
    "granite", "hunyuan_v1_dense", "llama", "llama4_text", "minimax_m2", "mistral", "mixtral", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "smollm3",
)
"""Each has something that none before it has: where it normalizes, what it rotates, windows, sinks, experts, scales."""


@pytest.mark.parametrize("model_type", DISTINCT)
def test_a_family_is_exact_in_learner_and_engine(model_type):
    assert_exact(model_type)


@pytest.mark.parametrize("model_type", sorted(set(EXACT) - set(DISTINCT)))
def test_a_family_that_is_built_like_others_is_exact_too(model_type):
    assert_exact(model_type)


def assert_exact(model_type):
    config = config_of(model_type)
    model = build_miniature(config, seed=1)
    rows = check_rows(model.get_output_embeddings().weight.shape[0], LENGTHS)

    expected = torch.cat([
        model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        for row in rows
    ])
    wanted = gradients(model, expected)
    greedy = [greedily(model, row.tolist()) for row in rows[:2]]
    model.set_attn_implementation(ATTENTION)
    rule = prepare_learner(model, score_rows, max_tokens=None)
    scored = score_rows(model, rule, rows)
    torch.testing.assert_close(scored, expected, atol=MOST_LOGPROB, rtol=0)
    assert_same_gradients(gradients(model, scored), wanted, GRADIENT.get(model_type, MOST_GRADIENT))

    alike = [torch.cat([rows[0][:5], row[5:]]) for row in rows]
    apart, shared = (score(model, rule, alike) for score in (score_rows, score_shared))
    torch.testing.assert_close(shared, apart, atol=MOST_LOGPROB, rtol=0)
    assert_same_gradients(
        gradients(model, shared), gradients(model, apart), GRADIENT.get(model_type, MOST_GRADIENT)
    )

    prepare_engine(model, max_tokens=64)
    model.set_attn_implementation(ATTENTION_NAME)
    assert generated(model, [row.tolist() for row in rows[:2]]) == greedy


def assert_same_gradients(found, wanted, most):
    largest = max(float(one.abs().max()) for one in wanted.values())
    for name in wanted.keys() | found.keys():
        difference = found.get(name, torch.zeros(())) - wanted.get(name, torch.zeros(()))
        assert float(difference.abs().max()) <= most * largest, name


def gradients(model, logprobs):
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@torch.no_grad()
def greedily(model, ids):
    prompt = len(ids)
    for _ in range(NEW_TOKENS):
        ids = [*ids, int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[prompt:]


@torch.inference_mode()
def generated(model, prompts):
    """What the native engine's scheduler generates for prompts that share its passes."""
    scheduler, done = Scheduler(Forward(model, len(prompts), 64), len(prompts), 2048), {}
    for place, prompt in enumerate(prompts):
        request = GenerateRequest(
            prompt_ids=prompt, sampling=Sampling(temperature=0.0), seed=place, max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
        deliver = lambda outcome, place=place: done.update({place: outcome})  # noqa: E731
        scheduler.waiting.append(Sequence(request, tuple(prompt), deliver, frozenset(), None))
    scheduler.new_version(VersionRef(1, 1), recompute=False)
    while scheduler.has_work:
        scheduler.step()
    return [done[place].token_ids for place in range(len(prompts))]


def test_the_page_is_what_the_tests_prove():
    assert PAGE.read_text().endswith("\n\n" + table()), "run: python -m tests.unit.architectures.families"


def test_every_family_that_is_refused_by_name_is_one_of_transformers_and_not_proved_exact():
    assert set(REFUSED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) and not set(REFUSED) & set(EXACT)


@pytest.mark.parametrize("model_type", ["bloom", "roberta", "bart", "jamba", "doge", "qwen3_next"])
def test_a_refused_family_is_refused_by_name_by_learner_and_engine(model_type):
    config = CONFIG_MAPPING[model_type]()
    built = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = SimpleNamespace(config=config, _can_set_attn_implementation=built._can_set_attn_implementation)

    with pytest.raises(NotExact, match=rf"{model_type} .*docs/models.md"):
        prepare_learner(model, score_rows, max_tokens=None)
    with pytest.raises(EngineError, match=rf"{model_type} .*docs/models.md"):
        prepare_engine(model, max_tokens=64)
