"""Every kind of attention gives what blocks give; what cannot run here is refused by name.

No kernel runs here: they need a GPU (`tests/gpu/test_attention_cuda.py`). A slow stand-in with their calling convention
checks what they are given.
"""

import gc
import random
import sys
import types
import weakref

import pytest
import torch
import torch.nn.attention.varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from learner.checkpoint.checkpoint import ResumeState
from learner.data.layout import cut_layout, make_layout
from learner.model.attention import kernels as choice
from learner.model.attention.kernels import (
    ATTENTIONS,
    Ends,
    attend_flex,
    attend_in_blocks,
    attend_varlen,
    choose_attention,
    gather,
)
from learner.model.policy import decoder_layers, load_policy
from learner.ranks.mesh import Ranks
from learner.setup.trainer import load_networks
from streamrl.architectures.attention import CAUSAL, MaskRule, attend, carry
from streamrl.errors import ConfigError
from tests.unit.config.setting_harness import config_of, tiny_model
from tests.unit.learner.test_packed_scoring import GROUPS, assert_same, passes
from tests.unit.learner.test_shared_prompts import rows_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYOUTS = {
    "plain": make_layout([7, 30, 2]),
    "shared": make_layout([20, 5, 1, 9, 13, 4, 6], [-1, 0, 0, 0, -1, -1, 5]),
    "chained": make_layout([20, 5, 1, 9, 13, 4, 6], [-1, 0, 1, 1, 0, -1, 5]),
}
LAYOUTS_OF_132 = make_layout([70, 9, 33, 20])
RULES = {
    "causal": lambda: MaskRule(causal_mask_function),
    "window": lambda: MaskRule(sliding_window_causal_mask_function(6), local_size=6),
    "chunks": lambda: MaskRule(
        chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.int64)), local_size=6
    ),
}


def inputs(layout, *, requires_grad=True):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(sum(layout.lengths), heads, 8, generator=generator).requires_grad_(requires_grad)
            for heads in (4, 2, 2)]  # fmt: skip


def slow_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, left):
    """One sequence after the other, queries aligned with the end of their keys, as the flash kernels do it."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q[0] == cu_k[0] == 0
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert cu_q[-1] == len(query) and cu_k[-1] == len(key) == len(value)
    outputs = []
    for sequence in range(len(cu_q) - 1):
        mine, keys = slice(*cu_q[sequence : sequence + 2].tolist()), slice(*cu_k[sequence : sequence + 2].tolist())
        q, k, v = (t.transpose(0, 1) for t in (query[mine], key[keys], value[keys]))
        places = torch.arange(k.shape[1])
        ages = places[k.shape[1] - q.shape[1] :, None] - places[None, :]
        seen = (ages >= 0) if left < 0 else (ages >= 0) & (ages <= left)
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture(params=["2.11", "2.13"])
def calls(request, monkeypatch):
    """Stand-ins for the packages of the kernels and PyTorch's own; the kinds that were called."""
    called = []

    def flash(name):
        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
            window_size=(-1, -1),
        ):
            called.append(name)
            assert causal and window_size[1] == (-1 if window_size[0] < 0 else 0)
            found = slow_varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
                left=window_size[0],
            )
            return (found, None) if name == "flash_attn_interface" else found

        module = types.ModuleType(name)
        module.flash_attn_varlen_func = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("flash_attn", "flash_attn_interface"):
        flash(name)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", fake_varlen_attn(request.param, called))
    return called


def fake_varlen_attn(torch_version, called):
    """A stand-in for PyTorch's function with the parameters that it has in that release."""

    def fake(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
        called.append("torch")
        assert window_size[1] == 0
        return slow_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, left=window_size[0])

    def fake_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return fake(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)

    def fake_of_2_13(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return fake(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)

    return {"2.11": fake_of_2_11, "2.13": fake_of_2_13}[torch_version]


@pytest.mark.parametrize("kind", ["varlen", "flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_varlen_kernel_is_given_what_makes_it_right_and_chunks_are_left_to_blocks(calls, kind, layout, rule):
    layout, rule, found = LAYOUTS[layout], RULES[rule](), []
    for attention in (attend_in_blocks, ATTENTIONS[kind]):
        mine = inputs(layout)
        out = attention(*mine, layout, rule, scaling=0.3)
        found.append([out, *torch.autograd.grad(out.square().sum(), mine)])

    assert len(calls) == (rule.window is not None or rule.is_causal(100))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [attend_in_blocks, attend_flex])
def test_masks_go_with_their_layout_without_waiting_for_the_garbage_collector(attention):
    layout = make_layout([20, 5, 9], [-1, 0, 0])
    with carry(layout):
        rule = RULES["window"]()
    attention(*inputs(layout, requires_grad=False), layout, rule, scaling=0.3)
    assert rule.carried is layout and layout._kept
    died = [weakref.ref(layout), *(weakref.ref(kept) for kept in layout._kept.values())]
    gc.disable()
    try:
        del layout, rule
        assert [one() for one in died] == [None] * len(died)
    finally:
        gc.enable()


def test_what_a_kernel_does_not_know_is_computed_in_blocks(calls):
    layout, sinks = LAYOUTS["shared"], torch.randn(4)
    rule, mine = RULES["causal"](), inputs(layout)
    for extras in ({"sinks": sinks}, {"softcap": 5.0}):
        out = ATTENTIONS["flash_attention_2"](*mine, layout, rule, **extras)
        torch.testing.assert_close(out, attend_in_blocks(*mine, layout, rule, **extras))
    wide = torch.randn(len(mine[2]), 2, 12)
    out = attend_varlen(slow_varlen, mine[0], mine[1], wide, layout, rule)

    assert out.shape[-1] == 12 and calls == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_block_mask_of_flex_attention_shows_what_blocks_show(layout, rule, softcap):
    """Forward only: FlexAttention has no backward pass on a CPU."""
    layout, rule = LAYOUTS[layout], RULES[rule]()
    mine = inputs(layout, requires_grad=False)
    extras = {} if softcap is None else {"softcap": softcap}

    out = attend_flex(*mine, layout, rule, scaling=0.3, **extras)

    expected = attend_in_blocks(*mine, layout, rule, scaling=0.3, **extras)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("flash", CPU, torch.float32, "is unknown: choose one of auto, sdpa, flex_attention, varlen"),
        ("flex_attention", CPU, torch.float32, "needs a CUDA device but this is cpu"),
        ("varlen", CUDA, torch.float32, "computes in half precision only and the policy's type is torch.float32"),
        ("flash_attention_2", CUDA, torch.bfloat16, "needs the package flash_attn, which is not installed"),
        ("flash_attention_3", CUDA, torch.float16, "needs the package flash_attn_interface, which is not installed"),
    ],
)
def test_what_cannot_be_computed_here_is_refused_with_its_reason(name, device, dtype, message):
    with pytest.raises(ConfigError, match=message):
        choose_attention(name, device=device, dtype=dtype)


def test_auto_takes_the_kernel_only_where_it_runs_and_agrees(monkeypatch):
    def chosen():
        return choose_attention("auto", device=CUDA, dtype=torch.bfloat16)

    assert choose_attention("auto", device=CPU, dtype=torch.bfloat16) == "sdpa"
    assert choose_attention("auto", device=CUDA, dtype=torch.float32) == "sdpa"
    monkeypatch.setattr(choice, "difference_from_sdpa", lambda *_, **__: 0.004)
    assert chosen() == "varlen"
    monkeypatch.setattr(choice, "difference_from_sdpa", lambda *_, **__: 0.4)
    assert chosen() == "sdpa"
    with pytest.raises(ConfigError, match="learner.attention=varlen differs from sdpa by 0.4"):
        choose_attention("varlen", device=CUDA, dtype=torch.bfloat16)


def test_gradients_of_a_key_that_hundreds_of_sequences_continue_are_rounded_once():
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 2, 4, generator=rng).bfloat16().requires_grad_()
    sources = torch.arange(8).repeat(512)
    gathered = gather(tokens, sources)
    weights = torch.rand(gathered.shape, generator=rng).bfloat16()
    (grad,) = torch.autograd.grad(gathered, tokens, weights)

    assert torch.equal(gathered, tokens[sources])
    exact = weights.double().view(512, 8, 2, 4).sum(0)
    assert grad.dtype == torch.bfloat16 and bool(((grad.double() - exact).abs() <= exact * 2**-8).all())


def test_the_check_before_a_run_finds_a_kernel_that_aligns_otherwise(calls, monkeypatch):
    assert choice.difference_from_sdpa("varlen", device=CPU, dtype=torch.float32) < 1e-5
    monkeypatch.setattr(  # a kernel that aligns queries with the beginning of their keys
        torch.nn.attention.varlen, "varlen_attn",
        lambda q, k, v, cu_q, cu_k, *_, **__: attend_in_blocks(q, k[: len(q)], v[: len(q)], LAYOUTS_OF_132, CAUSAL),
    )
    assert choice.difference_from_sdpa("varlen", device=CPU, dtype=torch.float32) > 0.1


@pytest.mark.shows("learner.attention")
def test_the_networks_of_a_run_compute_with_the_attention_that_is_set(tmp_path, calls, monkeypatch):
    model_dir = tiny_model(tmp_path)

    def load(name):
        return load_networks(
            config_of(f"learner.attention={name}"), model_dir, ResumeState("run"), Ranks(), with_critic=False,
            with_reference=False,
        ).policy

    with pytest.raises(ConfigError, match="learner.attention=flash_attention_2 needs a CUDA device"):
        load("flash_attention_2")
    monkeypatch.setattr(choice, "why_not", lambda *_, **__: "")  # as if the kernel ran here
    rows = [row for row in rows_of(GROUPS)]
    for row in rows:
        row.prompt_ids[:], row.token_ids[:] = row.prompt_ids % 14, row.token_ids % 14
    expected, got = (passes(load(name), rows, share=share) for name, share in (("sdpa", False), ("varlen", True)))

    assert set(calls) == {"torch"}
    assert_same(got, expected)


def test_eager_attention_is_that_of_sdpa_without_its_kernel(tmp_path, monkeypatch):
    model_dir, fused = tiny_model(tmp_path), []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda *args, **options: fused.append(1) or kernel(*args, **options))
    rows = list(rows_of(GROUPS))
    for row in rows:
        row.prompt_ids[:], row.token_ids[:] = row.prompt_ids % 14, row.token_ids % 14
    found = []
    for name in ("eager", "sdpa"):
        policy = load_networks(
            config_of(f"learner.attention={name}"), model_dir, ResumeState("run"), Ranks(), with_critic=False,
            with_reference=False,
        ).policy
        fused.clear()
        found.append(passes(policy, rows, share=name == "eager"))
        assert bool(fused) == (name == "sdpa")
    assert_same(*found)


def test_compiled_layers_under_fsdp2_give_the_same(checkpoints):
    """The backend of this test makes graphs and their backward passes, and leaves out the C++ of the real one."""
    import torch._dynamo.utils

    rows = rows_of(GROUPS)
    expected = passes(load_policy(checkpoints["qwen3-tied"]), rows, share=False)
    ranks = Ranks.start("cpu", sharded=True)
    try:
        policy = load_policy(checkpoints["qwen3-tied"], compile_with="aot_eager", ranks=ranks)
        torch._dynamo.utils.counters.clear()
        first = passes(policy, rows, share=True)
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        logprobs, gradients, num_tokens = passes(policy, rows[:7], share=False)  # another shape
        gradients = [getattr(g, "full_tensor", lambda g=g: g)() for g in first[1]]
    finally:
        ranks.close()
        torch._dynamo.reset()

    assert num_graphs > 0
    torch.testing.assert_close(logprobs, expected[0][: len(logprobs)], atol=1e-5, rtol=1e-5)
    assert_same((first[0], gradients, first[2]), expected)


@pytest.mark.shows("learner.compile")
def test_the_layers_of_a_run_are_compiled_if_it_asks_for_it(tmp_path):
    model_dir, compiled = tiny_model(tmp_path), []
    for words in ((), ("learner.compile=true",)):
        networks = load_networks(
            config_of(*words), model_dir, ResumeState("run"), Ranks(), with_critic=False, with_reference=False
        )
        compiled.append({layer._compiled_call_impl is not None for layer in decoder_layers(networks.policy.model)})

    assert compiled == [{False}, {True}]


WINDOW = MaskRule(lambda row, head, query, key: (key <= query) & (key > query - 4), local_size=4)
CHUNKS = MaskRule(lambda row, head, query, key: (key <= query) & (key // 3 == query // 3), local_size=3, plain=False)


def by_sequence(query, key, value, ends: Ends, scale, left):
    """A kernel for sequences of different length, one after another: queries end where keys do."""
    found = []
    for one in range(len(ends.queries) - 1):
        (first, last), (low, high) = ends.queries[one : one + 2].tolist(), ends.keys[one : one + 2].tolist()
        places = torch.arange(high - low)
        seen = places <= places[len(places) - (last - first) :, None]
        if left >= 0:
            seen &= places >= places[len(places) - (last - first) :, None] - left
        parts = (t.transpose(0, 1)[None] for t in (query[first:last], key[low:high], value[low:high]))
        found.append(attend(*parts, mask=seen[None, None], scaling=scale)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("rule", [CAUSAL, WINDOW, CHUNKS], ids=["causal", "window", "chunks"])
def test_the_parts_of_a_row_are_the_row_whatever_a_rule_hides(rule):
    chance = random.Random(0)
    torch.manual_seed(0)
    for _ in range(60):
        lengths = [chance.randint(1, 9) for _ in range(chance.randint(1, 6))]
        parents = [chance.choice([-1, *range(child)]) for child in range(len(lengths))]
        size = chance.choice([2, 3, 4])
        padding = -sum(lengths) % size
        width = (sum(lengths) + padding) // size
        packing = make_layout([*lengths, *[1] * padding], [*parents, *[-1] * padding])
        query, key, value = (torch.randn(width * size, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
        whole = attend_in_blocks(query, key, value, packing, rule)
        for part in (slice(at * width, (at + 1) * width) for at in range(size)):
            cut = cut_layout(
                make_layout(lengths, parents), part.start, part.stop, padding=padding, gather=lambda keys: keys
            )
            torch.testing.assert_close(attend_in_blocks(query[part], key, value, cut, rule), whole[part])
            varied = attend_varlen(by_sequence, query[part], key, value, cut, rule)
            torch.testing.assert_close(varied, whole[part])
