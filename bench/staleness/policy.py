"""Many small transformers trained at once: every weight has a leading member dimension, every product is batched.

A member is one run of the experiment (a lag, a learning rate, a seed). Members share nothing but the loop, so the cost
of Python is paid once for all of them.

    E members   R rows per member   L tokens per row   F input features   D width   A digits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]  # name -> [E, rows, columns]
NUM_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """One pre-norm transformer block over L positions. `num_outputs` is NUM_DIGITS for a policy, 1 for a critic."""

    num_tokens: int
    width: int = 32
    num_heads: int = 2
    hidden: int = 128
    num_outputs: int = NUM_DIGITS

    @property
    def num_features(self) -> int:
        """Two prompt digits, the previous answer digit or "start", the position; one-hot each."""
        return 3 * NUM_DIGITS + 1 + self.num_tokens

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of every weight matrix, in the order in which they lie in the flat vector."""
        return {
            "embed": (self.num_features, self.width),
            "qkv": (self.width, 3 * self.width),
            "mix": (self.width, self.width),
            "up": (self.width, self.hidden),
            "up_bias": (1, self.hidden),
            "down": (self.hidden, self.width),
            "head": (self.width, self.num_outputs),
            "head_bias": (1, self.num_outputs),
        }

    @property
    def num_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices().values())


def initial_parameters(shape: Shape, generator: torch.Generator) -> Tensor:
    """Parameters of one member, [P]: scaled normal, the head and the biases zero, so that it starts uniform."""
    parts = []
    for name, (rows, columns) in shape.matrices().items():
        zero = name.startswith("head") or name.endswith("bias")
        # The four inputs of `embed` are one-hot: their sum has variance 1.
        scale = 0.0 if zero else 0.5 if name == "embed" else 1.0 / math.sqrt(rows)
        parts.append(scale * torch.randn(rows * columns, generator=generator))
    return torch.cat(parts)


def split(shape: Shape, flat: Tensor) -> dict[str, Tensor]:
    """Views of the flat parameters [E, P] as matrices [E, rows, columns]."""
    sizes = [rows * columns for rows, columns in shape.matrices().values()]
    pieces = flat.split(sizes, dim=1)
    return {
        name: piece.unflatten(1, size) for (name, size), piece in zip(shape.matrices().items(), pieces, strict=True)
    }


def features(shape: Shape, prompts: Tensor, previous: Tensor, first: int = 0) -> Tensor:
    """One-hot inputs [E, R, l, F] of positions `first` to `first + l - 1`.

    `prompts` [E, R, L] digits; `previous` [E, R, l] the answer digit before each position, NUM_DIGITS for "start".
    """
    count = previous.shape[-1]
    span = slice(first, first + count)
    mirrored = prompts.flip(-1)
    position = torch.arange(first, first + count).expand_as(previous)
    offsets = (0, NUM_DIGITS, 2 * NUM_DIGITS, 3 * NUM_DIGITS + 1)
    ids = (prompts[..., span], mirrored[..., span], previous, position)
    index = torch.stack([part + offset for part, offset in zip(ids, offsets, strict=True)], dim=-1)
    return torch.zeros(*previous.shape, shape.num_features).scatter_(-1, index, 1.0)


@dataclass(slots=True)
class Cache:
    """Keys and values of the positions generated so far, each [E R, 1, H, D / H]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def forward(shape: Shape, weights: Weights, inputs: Tensor, cache: Cache | None = None) -> Tensor:
    """Outputs [E, R, l, num_outputs] for inputs [E, R, l, F].

    Without a cache the l = L positions see each other causally; with one, l = 1 and the position sees what was cached,
    its own key included.
    """
    members, rows, length, _ = inputs.shape
    stream = torch.bmm(inputs.flatten(1, 2), weights["embed"])
    query, key, value = torch.bmm(_normal(stream), weights["qkv"]).chunk(3, dim=-1)

    def heads(packed: Tensor) -> Tensor:
        return packed.reshape(members * rows, -1, shape.num_heads, shape.width // shape.num_heads)

    if cache is None:
        swapped = (heads(part).transpose(1, 2) for part in (query, key, value))
        seen = F.scaled_dot_product_attention(*swapped, is_causal=True).transpose(1, 2)
    else:
        cache.keys.append(heads(key))
        cache.values.append(heads(value))
        seen = _last_position(heads(query), torch.cat(cache.keys, dim=1), torch.cat(cache.values, dim=1))
    stream = stream + torch.bmm(seen.reshape(members, rows * length, -1), weights["mix"])
    inner = torch.baddbmm(weights["up_bias"], _normal(stream), weights["up"]).relu()
    stream = torch.baddbmm(stream, inner, weights["down"])
    return torch.baddbmm(weights["head_bias"], _normal(stream), weights["head"]).unflatten(1, (rows, length))


def _last_position(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one position over l, all [E R, 1 or l, H, D / H]: for one query products beat matrix kernels."""
    attention = (query * keys).sum(-1, keepdim=True).div_(math.sqrt(query.shape[-1])).softmax(dim=1)
    return (attention * values).sum(1, keepdim=True)


def _normal(stream: Tensor) -> Tensor:
    return F.rms_norm(stream, stream.shape[-1:])


@torch.no_grad()
def generate(
    shape: Shape, weights_at: Callable[[int], Weights], prompts: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Answers token by token with a key-value cache: tokens int64 [E, R, L], log-probs as sampled [E, R, L].

    `weights_at(i)` are the weights that sample token i: they may change in the middle of a row, and the cache then
    keeps what older weights computed. `noise` [E, R, L, A] is Gumbel noise: argmax(logits + noise) samples the softmax.
    """
    cache, tokens, logprobs = Cache(), [], []
    previous = torch.full_like(prompts[..., :1], NUM_DIGITS)
    for position in range(shape.num_tokens):
        inputs = features(shape, prompts, previous, position)
        logits = forward(shape, weights_at(position), inputs, cache)
        previous = (logits + noise[..., position : position + 1, :]).argmax(-1)
        tokens.append(previous)
        logprobs.append(logits.log_softmax(-1).gather(-1, previous[..., None]).squeeze(-1))
    return torch.cat(tokens, dim=-1), torch.cat(logprobs, dim=-1)


def shifted(tokens: Tensor) -> Tensor:
    """The digit before each position: "start", then the answer without its last digit; [E, R, L]."""
    return torch.cat([torch.full_like(tokens[..., :1], NUM_DIGITS), tokens[..., :-1]], dim=-1)
