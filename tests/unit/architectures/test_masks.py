"""The rule of a layer reaches our attention functions as transformers means it."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from streamrl.architectures.attention import CAUSAL, MaskRule, attend, check_extras, keep_rule, rule_of

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
