"""Log-probs from logits against TRL."""

import torch

from bench import pieces

from .compare import agree


def test_log_probs_at_a_temperature_agree_with_trl_in_value_and_gradient(trl):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 50, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(0, 50, (3, 7), generator=generator)
    upstream = torch.randn(3, 7, generator=generator, dtype=torch.float64)

    def both(function, **knobs):
        leaf = logits.clone().requires_grad_()
        out = function(leaf, tokens, temperature=0.7, **knobs)
        (out * upstream).sum().backward()
        return out, leaf.grad

    for mine, expected in zip(both(pieces.token_logprobs, chunk=5), both(trl.selective_log_softmax), strict=True):
        agree(mine, expected)
