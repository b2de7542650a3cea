"""Causal attention over a packed row, as transformers calls it: sequences that lie end to end never see one another.

What else a layer hides, a window or chunks, comes from the model's own mask rule (`streamrl.architectures.attention`).

Legend: N packed tokens, H query heads, K key/value heads, D head size.

Context parallelism: each rank of an axis computes an equal part of a packed row, in the row's order. Tokens meet in
attention alone. There the keys and values of all parts are gathered, and their gradients added up for the rank of each.
What a part sees of them is in its layout (`cut_layout`): every mask rule and every kernel is exact.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from learner.data.layout import PackedLayout, cut_layout
from learner.model.attention.kernels import ATTENTIONS, Attention, attend_in_blocks
from streamrl.architectures.attention import carry, check_extras, register, rule_of

AXIS = "context_axis"
"""The attribute of a decoder with the process group that its rows are cut over."""


def cut(tokens: Tensor, positions: Tensor, packing: PackedLayout, axis: Any) -> tuple[Tensor, Tensor, PackedLayout]:
    """This rank's part of a row; tokens that see only themselves fill the last one up."""
    width = -(-len(tokens) // axis.size())
    part, padding = slice(axis.rank() * width, (axis.rank() + 1) * width), (0, width * axis.size() - len(tokens))
    layout = packing.kept(("cut", axis), lambda: cut_layout(
        packing, part.start, part.stop, padding=padding[1], gather=partial(gather, axis=axis)
    ).to(tokens.device))
    return *(torch.nn.functional.pad(tensor, padding)[part] for tensor in (tokens, positions)), layout


def gather(part: Tensor, axis: Any) -> Tensor:
    """The parts of all ranks, one after another; differentiable, a collective call in both passes."""
    found = _Gather.apply(part, axis)
    assert isinstance(found, Tensor)
    return found


# Under their names before torch 2.13 both warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        whole = part.new_empty(axis.size() * len(part), *part.shape[1:])
        _all_gather(whole, part.contiguous(), group=axis)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.new_empty(len(gradient) // ctx.axis.size(), *gradient.shape[1:])
        _reduce_scatter(part, gradient.contiguous(), group=ctx.axis)
        return part, None


ATTENTION = "streamrl_packed"
"""Name under which transformers finds `packed_attention`, and the mask function that keeps the model's rule."""


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, packing: PackedLayout | None = None,
    attention: Attention = attend_in_blocks, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' `AttentionInterface`: query [1, H, N, D], key and value [1, K, N, D].

    Returns ([1, N, H, D], None). `packing` reaches it as a keyword of the model's forward, so that a layer recomputed
    in the backward pass gets it too. `dropout` is not applied: a scored token must have the probability that the actor
    recorded for it. Raises ValueError for what it cannot compute.
    """
    rule, extras = rule_of(module, attention_mask), check_extras(module, kwargs)
    packing = packing or rule.carried
    if packing is None:
        raise ValueError(f"{type(module).__name__} did not pass `packing` on to its attention: model is not supported")
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    if packing.gather is not None:
        key, value = packing.gather(key), packing.gather(value)
    return attention(query, key, value, packing, rule, scaling=scaling, **extras)[None], None


@cache
def registered(kind: str, *, compiled: bool = False) -> str:
    """The name under which transformers finds packed attention of a kind of `ATTENTIONS`.

    `compiled`: for layers that torch.compile traces; attention then stays outside of their graphs, because its layout
    is another one in every micro-batch.
    """
    # Numbers, because transformers reads meaning into a name that holds "sdpa" or "flash".
    name = f"{ATTENTION}_{list(ATTENTIONS).index(kind)}"
    function = partial(packed_attention, attention=ATTENTIONS[kind])
    if compiled:
        name += "_compiled"
        function = torch.compiler.disable(lambda *args, attend=function, **kwargs: attend(*args, **kwargs))
    AttentionInterface.register(name, function)
    register(name)
    return name


def decoder_of(model: Any) -> Any:
    """The part of a causal language model that gives hidden states; some architectures' `get_decoder` does not."""
    found = model.get_decoder()
    if isinstance(found, PreTrainedModel) and found is not model:
        return found
    return getattr(model, "model", model.base_model)


def prefix_in(model: torch.nn.Module, decoder: torch.nn.Module) -> str | None:
    """The beginning of the names that the tensors of a decoder have in another model around one of its class."""
    return next((f"{name}." for name, part in model.named_modules() if isinstance(decoder, type(part))), None)


def packed_states(decoder: Any, tokens: Tensor, positions: Tensor, packing: PackedLayout) -> Tensor:
    """Last hidden states [N, hidden] of packed tokens [N] at positions [N] of their own sequences."""
    num_tokens, axis = len(tokens), getattr(decoder, AXIS, None)
    if axis is not None:
        tokens, positions, packing = cut(tokens, positions, packing, axis)
    with carry(packing):
        found = decoder(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, packing=packing,
            # Ones, and not None: transformers would add to the rule what tells packed rows apart; it is about one row.
            attention_mask=torch.ones_like(tokens)[None],
        ).last_hidden_state.squeeze(0)
    return found if axis is None else gather(found, axis)[:num_tokens]


AttentionInterface.register(ATTENTION, packed_attention)
register(ATTENTION)
