"""Log-probs and entropies over the ids that each token was drawn from: `log pi(a) - log sum of pi over the set`.

Only the logits of these ids are computed, some thousand at a time, forward and backward, so that memory and work grow
with the sets and not with the vocabulary.

Legend: P tokens with a set, K ids of all sets, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.data.token_sets import TokenSets
from learner.model.scoring.logit_rule import LogitRule

_IDS_PER_TOKEN = 4
"""Ids whose rows of the output layer are read at once, for each token of a chunk."""


def score_in_sets(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, sets: TokenSets, *, bias: Tensor | None, rule: LogitRule,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token of its set, and entropy of the distribution over the set; [P] each, nats.

    Args:
        hidden, temperatures: [P, H] and [P], of the tokens with a set alone.
    """
    return _ScoreInSets.apply(hidden, weight, bias, temperatures, sets, rule, _IDS_PER_TOKEN * chunk_tokens)


@torch.no_grad()
def logprobs_in_sets(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, sets: TokenSets, *, bias: Tensor | None, rule: LogitRule,
    chunk_tokens: int,
) -> Tensor:
    """Log-prob of every id of every set [K]."""
    inverse = temperatures.to(torch.promote_types(hidden.dtype, torch.float32)).reciprocal()
    return _log_p(hidden, weight, bias, inverse, sets, rule, _IDS_PER_TOKEN * chunk_tokens)[0]


def _log_p(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse: Tensor, sets: TokenSets, rule: LogitRule, block: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of all ids [K], and the log of each set's sum [P]."""
    logits = inverse.new_empty(len(sets.ids))
    for own, owner, ids in _blocks(sets, block):
        logits[own] = torch.linalg.vecdot(hidden[owner].to(inverse.dtype), weight[ids].to(inverse.dtype))
    if bias is not None:
        logits += bias[sets.ids]
    logits = rule(logits).mul_(inverse[sets.owner])
    highest = inverse.new_full((len(inverse),), float("-inf")).scatter_reduce_(0, sets.owner, logits, "amax")
    total = torch.zeros_like(inverse).index_add_(0, sets.owner, (logits - highest[sets.owner]).exp_())
    log_sums = highest + total.log()
    return logits.sub_(log_sums[sets.owner]), log_sums


class _ScoreInSets(torch.autograd.Function):
    """Keeps hidden states, weights and the log-probs of the sets for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, sets: TokenSets,
        rule: LogitRule, block: int,
    ) -> tuple[Tensor, Tensor]:
        inverse = temperatures.to(torch.promote_types(hidden.dtype, torch.float32)).reciprocal()
        log_p, log_sums = _log_p(hidden, weight, bias, inverse, sets, rule, block)
        entropy = torch.zeros_like(inverse).index_add_(0, sets.owner, log_p.exp().mul_(log_p)).neg_()
        ctx.save_for_backward(hidden, weight, bias, inverse, log_p, log_sums, entropy)
        ctx.sets, ctx.rule, ctx.block = sets, rule, block
        ctx.set_materialize_grads(False)
        return log_p[sets.chosen], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, inverse, log_p, log_sums, entropy = ctx.saved_tensors
        sets, wide = ctx.sets, inverse.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        chosen = torch.zeros_like(entropy) if to_logprobs is None else to_logprobs
        # g (onehot - p) - e p (log p + H)
        down = chosen[sets.owner]
        if to_entropy is not None:
            down = down + to_entropy[sets.owner] * (log_p + entropy[sets.owner])
        down = down.mul(log_p.exp()).neg_().index_add_(0, sets.chosen, chosen).mul_(inverse[sets.owner])
        logits = None if ctx.rule.cap is None else (log_p + log_sums[sets.owner]) / inverse[sets.owner]
        down = ctx.rule.pull_back_(down, logits)
        to_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if wants_hidden else None
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        for own, owner, ids in _blocks(sets, ctx.block):
            if to_hidden is not None:
                to_hidden.index_add_(0, owner, down[own, None] * weight[ids])
            if to_weight is not None:
                to_weight.index_add_(0, ids, down[own, None] * hidden[owner])
        to_bias = None
        if wants_bias:
            to_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device).index_add_(0, sets.ids, down)
        found = ((to_hidden, hidden), (to_weight, weight), (to_bias, bias))
        return *(None if one is None else one.to(like.dtype) for one, like in found), None, None, None, None


def _blocks(sets: TokenSets, block: int) -> list[tuple[slice, Tensor, Tensor]]:
    """(where in [K], owners, ids) of so many ids at a time."""
    parts = [slice(first, first + block) for first in range(0, len(sets.ids), block)]
    return [(own, sets.owner[own], sets.ids[own]) for own in parts]
