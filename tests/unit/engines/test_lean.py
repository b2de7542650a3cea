"""The pass without modules gives what the model's own code gives, and leaves to that what it does not know."""

import copy
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.engines.native.forward import ATTENTION_NAME, Forward, Prompt
from actors.engines.native.lean import why_plain
from actors.engines.native.matrices import below_each_other
from actors.engines.native.weights import WeightSets
from streamrl.architectures.rope import fix_rope
from tests.kit.each import each
from tests.unit.engines.tiny_models import document, engine_for, mistral, prompt_of, qwen3, request

pytestmark = pytest.mark.timeout(60)
NONE = torch.empty(0, dtype=torch.int64)
LONGEST = 48
ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}  # fmt: skip


def sizes(**more) -> dict:
    return {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.25, **more,
    }  # fmt: skip


def drawn(seed: int) -> torch.nn.Module:
    """Any member of the families: heads that share keys or not, tied heads, biases, norms, scaled rotations."""
    pick = random.Random(seed)
    key_heads, shared = pick.choice([1, 2, 3]), pick.choice([1, 2, 4])
    common = sizes(
        vocab_size=pick.randrange(20, 90), hidden_size=key_heads * shared * pick.choice([4, 10]),
        intermediate_size=pick.choice([8, 56]),
        num_hidden_layers=pick.choice([1, 2, 3]), num_attention_heads=key_heads * shared,
        num_key_value_heads=key_heads, head_dim=pick.choice([4, 8, 16]), tie_word_embeddings=pick.random() < 0.5,
        rope_parameters=copy.deepcopy(pick.choice(ROPES)), rms_norm_eps=pick.choice([1e-6, 1e-5, 1e-2]),
    )  # fmt: skip
    biased = pick.random() < 0.5
    torch.manual_seed(seed)
    model = [
        lambda: LlamaForCausalLM(LlamaConfig(**common, attention_bias=biased, mlp_bias=pick.random() < 0.5)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**common)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**common, attention_bias=biased)),
    ][seed % 3]()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def forward_of(model: torch.nn.Module) -> Forward:
    model = copy.deepcopy(model).requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return Forward(model, 5, LONGEST)


@torch.inference_mode()
def passes(forward: Forward, vocabulary: int) -> list[torch.Tensor]:
    """Logits of prompts, some of one length and one of two rows, of steps with and without prompts, and of a score."""
    token = torch.Generator().manual_seed(0)
    ids = lambda *shape: torch.randint(vocabulary, shape, generator=token)  # noqa: E731
    found = [forward.run(NONE, NONE, 0, [Prompt(ids(n).tolist(), r) for n, r in ((5, [0]), (5, [1, 3]), (33, [2]))])]
    places = torch.tensor([5, 5, 33, 5])
    for step in range(3):
        late = [Prompt(ids(7).tolist(), [4])] if step == 1 else []
        found.append(forward.run(ids(4), places + step, 34 + step, late))
    return [*found, torch.tensor(forward.score(ids(LONGEST).tolist(), 3, 0.7))]


@each("seed", range(24))
def test_any_member_of_the_families_gets_the_logits_of_its_own_code(seed):
    """The error against float64 is like that of the model's own code in float32, which rounds in another order."""
    model = drawn(seed)
    lean, plain, wide = forward_of(model), forward_of(model), forward_of(copy.deepcopy(model).double())
    assert lean.lean is not None and wide.lean is None
    plain.lean = None
    for found in zip(*(passes(forward, model.config.vocab_size) for forward in (lean, plain, wide)), strict=True):
        mine, own, truth = (one.double() for one in found)
        scale = float(truth.abs().max().clamp(min=1))
        assert float((mine - truth).abs().max()) <= 2 * float((own - truth).abs().max()) + 1e-6 * scale
        torch.testing.assert_close(mine, own, atol=4e-6 * scale, rtol=0)


def part_of_a_users(model: torch.nn.Module) -> torch.nn.Module:
    class Louder(torch.nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    model.model.layers[1].mlp.down_proj.__class__ = Louder
    return model


def hooked(model: torch.nn.Module) -> torch.nn.Module:
    model.model.norm.register_forward_hook(lambda module, args, out: out)
    return model


def forward_of_its_own(model: torch.nn.Module) -> torch.nn.Module:
    model.model.norm.forward = lambda hidden: hidden
    return model


KEPT_PLAIN = {
    "is none of the families": mistral,
    "is a GELUActivation": lambda: LlamaForCausalLM(LlamaConfig(**sizes(hidden_act="gelu"))),
    "is a Louder": lambda: part_of_a_users(qwen3()),
    "a forward of its own": lambda: forward_of_its_own(qwen3()),
    "hooks in its modules": lambda: hooked(qwen3()),
    "float32 on a CPU": lambda: qwen3().bfloat16(),
    "sliding_attention": lambda: Qwen2ForCausalLM(
        Qwen2Config(**sizes(use_sliding_window=True, sliding_window=7, max_window_layers=1))
    ),
    r"\(dynamic\) that depend": lambda: LlamaForCausalLM(LlamaConfig(**sizes(rope_parameters=DYNAMIC))),
    r"\(longrope\) that depend": lambda: LlamaForCausalLM(LlamaConfig(**sizes(rope_parameters=LONGROPE))),
}


@each("reason", KEPT_PLAIN)
def test_a_model_that_differs_keeps_its_own_code_and_is_right(reason):
    model = KEPT_PLAIN[reason]().eval()
    forward = forward_of(model)
    assert forward.lean is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(why_plain(model))
    prompt = [3, 9, 27, 5, 11, 2, 30, 8, 8, 1]
    with torch.inference_mode():
        own = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
        got = forward.run(NONE, NONE, 0, [Prompt(prompt)])[0]
    torch.testing.assert_close(got, own, atol=0.1 if "float32" in reason else 1e-5, rtol=0)


def test_rotations_that_were_fixed_for_a_run_are_those_of_the_lean_pass():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes(rope_parameters=LONGROPE))).eval()
    fix_rope(model, LONGEST)
    lean, plain = forward_of(model), forward_of(model)
    assert lean.lean is not None
    plain.lean = None
    torch.testing.assert_close(passes(lean, 40), passes(plain, 40), atol=1e-5, rtol=0)


async def test_a_hook_that_comes_later_is_called_in_the_passes_that_follow():
    model = qwen3()
    async with engine_for(model) as engine:
        ids = prompt_of(12)
        before = await engine.score(ids, start=1, temperature=1.0)
        inner = engine._scheduler.forward._model.model
        hook = inner.norm.register_forward_hook(lambda module, args, out: -out)
        turned = await engine.score(ids, start=1, temperature=1.0)
        hook.remove()
        assert await engine.score(ids, start=1, temperature=1.0) == before != turned
        assert len((await engine.generate(request(ids, 3))).token_ids) == 3


async def test_installs_keep_what_one_product_reads_in_one_piece_of_memory():
    model = qwen3(tied=False)
    async with engine_for(model, install=False) as engine:
        forward = engine._scheduler.forward
        check_installs(forward._model, forward, engine._weights)


def check_installs(model: torch.nn.Module, forward: Forward, sets: WeightSets) -> None:
    for seed in (1, 2, 3, 4):
        other = qwen3(seed, tied=False)
        staged = sets.stage(document(other))
        forward.lean.use(forward.lean.ready(staged))
        sets.swap(staged)
        for layer, theirs in zip(model.model.layers, other.model.layers, strict=True):
            group = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
            whole = below_each_other(group)
            assert whole.data_ptr() == group[0].data_ptr() and whole.shape == (64, 32)
            expected = torch.cat([getattr(theirs.self_attn, f"{name}_proj").weight for name in "qkv"])
            assert torch.equal(whole, expected)
            assert forward.lean._ready.layers[0].heads.keywords["weight"].data_ptr() in {
                layer.self_attn.q_proj.weight.data_ptr() for layer in model.model.layers
            }
    assert below_each_other([torch.ones(2, 3), torch.zeros(1, 3)]).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]


