"""Log-probs and entropies from hidden states, holding the logits of one chunk of tokens at a time.

A vocabulary of 150,000 makes the logits of 4,096 tokens 2.4 GB in float32, and autograd would keep them. Here they
exist `chunk_tokens` rows at a time, in the forward pass and, computed again, in the backward pass. The last rows are
not computed again: they are kept, and the backward pass begins with them, so that they add nothing to its peak.

Where a token was drawn from a set of ids, `log pi(a) - log sum of pi over the set`: only the logits of these ids are
computed, so that memory and work grow with the sets and not with the vocabulary. A `LogitRule` is what a model does to
its logits after the output layer: Cohere and Granite scale, Gemma caps them.

On a GPU with Triton the passes over all logits of a chunk are kernels (`learner.model.scoring.kernel`), where the
output layer has no bias and no cap; the tensor operations here are their reference.

Legend: M scored tokens, H hidden size, V vocabulary, P tokens with a set, K ids of all sets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn.functional import linear

from learner.data.packing import TokenSets

log = logging.getLogger("streamrl.learner")

_MOST_DIFFERENCE = 1e-4  # of a logit, relative to the largest; measured about 1e-6


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = cap * tanh(scale * z / cap), z from the output layer; without a cap, scale * z."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Logits from the output layer's values; works in place."""
        if self.scale != 1.0:
            raw = raw.mul_(self.scale)
        if self.cap is not None:
            raw = raw.div_(self.cap).tanh_().mul_(self.cap)
        return raw

    def pull_back_(self, down: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient in z, from that in the logits; overwrites both. `logits` only with a cap."""
        if self.cap is not None:
            down = down.mul_(logits.div_(self.cap).square_().neg_().add_(1.0))
        return down.mul_(self.scale) if self.scale != 1.0 else down


PLAIN = LogitRule()


@torch.no_grad()
def measure_logit_rule(
    states: Sequence[Tensor], logits: Sequence[Tensor], head: Any, *, cap: float | None
) -> LogitRule:
    """The rule that leads from last hidden states to the model's own logits, read off rows of both.

    Args:
        states, logits: [T, hidden] and [T, vocabulary] of each row, by the model's own forward pass.
        cap: what the model's configuration says.
    Raises:
        ValueError: no such rule does.
    """
    raw = torch.cat([linear(state, head.weight, getattr(head, "bias", None)) for state in states]).double()
    final = torch.cat(list(logits)).double()
    inner = final if cap is None else cap * torch.atanh((final / cap).clamp(-1 + 1e-12, 1 - 1e-12))
    # Near the cap float32 has lost what would invert it.
    sure = torch.ones_like(final, dtype=torch.bool) if cap is None else final.abs() < 0.9 * cap
    scale = float((raw * inner)[sure].sum() / raw[sure].square().sum().clamp_min(1e-300))
    rule = LogitRule(1.0 if abs(scale - 1.0) < 1e-6 else scale, cap)
    difference = float((rule(raw) - final).abs().max() / final.abs().max().clamp_min(1e-12))
    if not difference <= _MOST_DIFFERENCE:
        raise ValueError(
            "its logits are neither a multiple of what the output layer gives nor a soft cap of it (they differ by "
            f"{difference:.2g} of the largest)"
        )
    return rule


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


def score_tokens(
    hidden: Tensor,  # [M, H]
    weight: Tensor,  # [V, H]
    targets: Tensor,  # int64 [M]
    temperatures: Tensor,  # [M], > 0
    *,
    bias: Tensor | None = None,  # [V]
    rule: LogitRule = PLAIN,
    chunk_tokens: int = 1024,
    sets: TokenSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy under `softmax(rule(hidden @ weight.T + bias) / temperature)`; [M] each, nats.

    Both are of the distribution over a token's set, where it has one. Computed and accumulated in float32 (float64 for
    float64 inputs). Differentiable in hidden, weight and bias.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1 (learner.logprob_chunk_tokens)")
    if sets is None:
        return _ScoreTokens.apply(hidden, weight, bias, targets, temperatures, rule, chunk_tokens)
    inside = score_in_sets(
        hidden[sets.tokens], weight, temperatures[sets.tokens], sets, bias=bias, rule=rule, chunk_tokens=chunk_tokens
    )
    if len(sets.tokens) == len(targets):
        return inside
    rest = torch.ones_like(targets, dtype=torch.bool).index_fill_(0, sets.tokens, False).nonzero()[:, 0]
    outside = _ScoreTokens.apply(
        hidden[rest], weight, bias, targets[rest], temperatures[rest], rule, chunk_tokens
    )
    places = torch.cat([sets.tokens, rest])
    logprobs, entropy = (
        torch.zeros_like(temperatures, dtype=one.dtype).index_copy(0, places, torch.cat([one, other]))
        for one, other in zip(inside, outside, strict=True)
    )
    return logprobs, entropy


@torch.no_grad()
def inspect_tokens(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, *, bias: Tensor | None = None, rule: LogitRule = PLAIN,
    chunk_tokens: int = 1024, keep_all: bool = False, sets: TokenSets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sum of squared probabilities of each token's distribution [M]; with `keep_all` also its log-probs [M, V]."""
    inverse = temperatures.to(torch.promote_types(hidden.dtype, torch.float32)).reciprocal()
    squares = torch.empty_like(inverse)
    kept: list[Tensor] = []
    for part in _parts(len(inverse), chunk_tokens):
        log_p = _logits(hidden[part], weight, bias, rule, inverse[part]).log_softmax(-1)
        squares[part] = (2.0 * log_p).exp().sum(-1)
        if keep_all:
            kept.append(log_p)
    everything = (torch.cat(kept) if kept else squares.new_zeros(0, weight.shape[0])) if keep_all else None
    if sets is not None:
        log_p = logprobs_in_sets(
            hidden[sets.tokens], weight, temperatures[sets.tokens], sets, bias=bias, rule=rule,
            chunk_tokens=chunk_tokens,
        )
        squares[sets.tokens] = torch.zeros_like(squares[sets.tokens]).index_add_(0, sets.owner, (2.0 * log_p).exp())
        if everything is not None:
            everything[sets.tokens] = float("-inf")
            everything[sets.tokens[sets.owner], sets.ids] = log_p
    return squares, everything


@torch.no_grad()
def mass_below(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, *, bias: Tensor | None = None,
    rule: LogitRule = PLAIN, chunk_tokens: int = 1024, sets: TokenSets | None = None,
) -> Tensor:
    """Probability of all ids smaller than each target [M]: where its part of the cumulative distribution begins."""
    inverse = temperatures.to(torch.promote_types(hidden.dtype, torch.float32)).reciprocal()
    ids, mass = torch.arange(weight.shape[0], device=weight.device), torch.empty_like(inverse)
    for part in _parts(len(inverse), chunk_tokens):
        probs = _logits(hidden[part], weight, bias, rule, inverse[part]).softmax(-1)
        mass[part] = (probs * (ids < targets[part, None])).sum(-1)
    if sets is not None:
        probs = logprobs_in_sets(
            hidden[sets.tokens], weight, temperatures[sets.tokens], sets, bias=bias, rule=rule,
            chunk_tokens=chunk_tokens,
        ).exp()
        below = probs * (sets.ids < targets[sets.tokens][sets.owner])
        mass[sets.tokens] = torch.zeros_like(mass[sets.tokens]).index_add_(0, sets.owner, below)
    return mass


class _ScoreTokens(torch.autograd.Function):
    """Keeps hidden states, weights, three numbers per token and the logits of one chunk for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor,
        rule: LogitRule, chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        inverse = temperatures.to(wide).reciprocal()
        logprobs = torch.empty(targets.shape, dtype=wide, device=hidden.device)
        entropy, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        logits, kernel = None, _kernel_for(hidden, weight, bias, rule)
        for part in _parts(len(targets), chunk):
            if kernel is None:
                logits = _logits(hidden[part], weight, bias, rule, inverse[part])
                log_sums[part], logprobs[part], entropy[part] = _statistics(logits, targets[part])
            else:
                logits = _products(hidden[part], weight, wide)
                kernel.measure(
                    logits,
                    inverse[part] * rule.scale,
                    targets[part],
                    log_sums=log_sums[part],
                    logprobs=logprobs[part],
                    entropy=entropy[part],
                )
        ctx.save_for_backward(hidden, weight, bias, targets, inverse, log_sums, entropy)
        ctx.chunk, ctx.rule, ctx.kernel = chunk, rule, kernel
        ctx.kept = logits if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse, log_sums, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = inverse.dtype
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        to_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if wants_bias else None
        chosen = torch.zeros_like(entropy) if to_logprobs is None else to_logprobs
        kept, ctx.kept = ctx.kept, None  # overwritten below: a second backward pass computes it again
        for part in reversed(_parts(len(targets), ctx.chunk)):
            if ctx.kernel is None:
                log_p = _logits(hidden[part], weight, bias, ctx.rule, inverse[part]) if kept is None else kept
                kept = None
                logits = None if ctx.rule.cap is None else log_p / inverse[part, None]
                log_p = log_p.sub_(log_sums[part, None])
                spread = None if to_entropy is None else to_entropy[part]
                down = _to_logits(log_p, targets[part], chosen[part], entropy[part], spread)
                down = ctx.rule.pull_back_(down.mul_(inverse[part, None]), logits)
                narrow = down.to(weight.dtype)
            else:
                down = narrow = ctx.kernel.pull_back(
                    _products(hidden[part], weight, wide) if kept is None else kept,
                    inverse[part] * ctx.rule.scale,
                    targets[part],
                    log_sums=log_sums[part],
                    entropy=entropy[part],
                    to_logprobs=chosen[part],
                    to_entropy=(torch.zeros_like(entropy) if to_entropy is None else to_entropy)[part],
                    dtype=weight.dtype,
                )
                kept = None
            if to_hidden is not None:
                to_hidden[part] = narrow @ weight
            if to_weight is not None:
                _add_product(to_weight, narrow.T, hidden[part])
            if to_bias is not None:
                to_bias.add_(down.sum(0))
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the sum of powers, log-prob of the target and entropy of each row of tempered logits."""
    highest = logits.amax(-1, keepdim=True)
    powers = (logits - highest).exp_()
    total = powers.sum(-1)
    log_sums = highest.squeeze(-1) + total.log()
    # H = logsumexp(z) - sum p z
    entropy = log_sums - torch.linalg.vecdot(powers, logits) / total
    return log_sums, logits.gather(-1, targets[:, None]).squeeze(-1) - log_sums, entropy


def _kernel_for(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule) -> ModuleType | None:
    """The kernels, where they compute the same for these inputs; None: the tensor operations do it."""
    plain = bias is None and rule.cap is None and hidden.dtype == weight.dtype != torch.float64
    if not plain or is_fake(hidden) or type(weight) not in (Tensor, Parameter):
        return None
    return _kernel_on(hidden.device)


@cache
def _kernel_on(device: torch.device) -> ModuleType | None:
    """The kernels, if they run on this device: compiled for a GPU, on a CPU in the interpreter alone."""
    if (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1") or find_spec("triton") is None:
        return None
    logits = torch.linspace(-3.0, 3.0, 14, device=device).view(2, 7)
    targets, found = torch.tensor([5, 0], device=device), torch.zeros(3, 2, device=device)
    try:
        from learner.model.scoring import kernel

        kernel.measure(logits, torch.ones_like(found[0]), targets, log_sums=found[0], logprobs=found[1],
                       entropy=found[2])
        torch.testing.assert_close(found, torch.stack(_statistics(logits, targets)), atol=1e-4, rtol=1e-4)
    except Exception as error:  # of a compiler, a driver, a version of Triton: none is worth a run
        log.warning("the output layer is computed without its Triton kernels, which do not run here: %s", error)
        return None
    return kernel


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in total's type. On a GPU half-precision factors are multiplied as such, which is many
    times faster than float32, and summed in float32; a CPU does the same sum with the same factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif _on_gpu(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _to_logits(log_p: Tensor, targets: Tensor, chosen: Tensor, entropy: Tensor, to_entropy: Tensor | None) -> Tensor:
    """Gradient in the tempered logits: `g (onehot - p) - e p (log p + H)`; overwrites `log_p`."""
    if to_entropy is None:
        down = log_p.exp_().mul_(-chosen[:, None])
    else:
        p = log_p.exp()
        down = log_p.add_(entropy[:, None]).mul_(to_entropy[:, None]).add_(chosen[:, None]).mul_(p).neg_()
    return down.scatter_add_(-1, targets[:, None], chosen[:, None].to(down.dtype))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, inverse: Tensor) -> Tensor:
    """Tempered logits in at least float32."""
    logits = _products(hidden, weight, inverse.dtype)
    if bias is not None:
        logits = logits.add_(bias)
    return rule(logits).mul_(inverse[:, None])


def _products(hidden: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """Half-precision products are summed in float32, never rounded to half."""
    if hidden.dtype == wide:
        return hidden @ weight.T
    if _on_gpu(hidden):
        return torch.mm(hidden, weight.T, out_dtype=wide)
    return hidden.to(wide) @ weight.to(wide).T


def _on_gpu(tensor: Tensor) -> bool:
    """Whether it is, or stands for one that is: memory is estimated for GPUs, with tensors that have none."""
    return tensor.is_cuda or is_fake(tensor)


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
