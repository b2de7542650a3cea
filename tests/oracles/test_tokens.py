"""Log-probs and entropies from logits against TRL."""

from __future__ import annotations

import torch

from bench import pieces

from .compare import agree


def test_log_probs_and_entropies_at_a_temperature_agree_with_trl_in_value_and_gradient(trl):
    """Its entropy takes logits that are divided by the temperature already."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 50, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(0, 50, (3, 7), generator=generator)
    upstream = torch.randn(3, 7, generator=generator, dtype=torch.float64)

    def both(function):
        leaf = logits.clone().requires_grad_()
        out = function(leaf)
        (out * upstream).sum().backward()
        return out, leaf.grad

    pairs = [
        (
            lambda z: pieces.token_logprobs(z, tokens, temperature=0.7, chunk=5),
            lambda z: trl.selective_log_softmax(z, tokens, temperature=0.7),
        ),
        (lambda z: pieces.token_entropy(z, temperature=0.7, chunk=5), lambda z: trl.entropy_from_logits(z / 0.7)),
    ]
    for ours, theirs in pairs:
        for mine, expected in zip(both(ours), both(theirs), strict=True):
            agree(mine, expected)
