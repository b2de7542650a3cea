"""The attention mask of a layer as the model itself declares it: a rule on positions inside one sequence.

transformers builds every mask of a model through one interface and hands it the rule as a function of two positions:
causal, a window, chunks, or what the architecture adds. Packed scoring and the native engine register `keep_rule`
there. So the rule reaches their attention functions whole, and each evaluates it where it needs it: packed rows and
cached rows have no common square mask.

`attend` is attention of queries to keys under a mask, with what some architectures add to the scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]

_carried: ContextVar[Any] = ContextVar("carried", default=None)


class MaskRule:
    """The key positions that a query position sees, both counted from the start of their own sequence."""

    def __init__(self, visible: MaskFunction, *, local_size: int | None = None, plain: bool = True) -> None:
        """`local_size`: rows no longer than this see everything before them; `plain`: nothing but that is added."""
        layout = _carried.get()
        # A layout keeps masks by their rules: a rule that kept its layout would leave both to the garbage collector.
        self._carried = None if layout is None else weakref.ref(layout)
        self._visible = visible
        self._local_size = local_size
        self._plain = plain
        self._squares: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def carried(self) -> Any:
        """The argument of `carry` when the model made its masks, while it lives; also where a layer is recomputed."""
        return None if self._carried is None else self._carried()

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """bool, as the two position tensors broadcast."""
        both, _ = torch.broadcast_tensors(query, key)  # `torch.broadcast_shapes` is Python, and felt in every pass
        return self._visible(0, 0, query, key).expand(both.shape)

    def is_causal(self, length: int) -> bool:
        """Whether each token of a row of `length` sees exactly itself and all before it."""
        return self._plain and (self._local_size is None or length <= self._local_size)

    @property
    def window(self) -> int | None:
        """Tokens that each token sees, itself included; None if that is not the whole rule."""
        size = self._local_size
        if size is None or not self._plain:
            return None
        last, first = torch.tensor(size), torch.tensor(1)
        return size if bool(self._visible(0, 0, last, first)) else None

    def square(self, length: int, device: torch.device) -> Tensor:
        """bool [length, length]: query positions down, key positions across."""
        if (length, device) not in self._squares:
            places = torch.arange(length, device=device)
            self._squares[length, device] = self.visible(places[:, None], places[None, :])
        return self._squares[length, device]


CAUSAL = MaskRule(causal_mask_function)
"""For layers that are called without a mask."""


@contextmanager
def carry(layout: Any) -> Iterator[None]:
    """Let the rules of a forward pass carry its layout to models that pass no keywords on to their attention."""
    token = _carried.set(layout)
    try:
        yield
    finally:
        _carried.reset(token)


def keep_rule(
    *args: Any, mask_function: MaskFunction = causal_mask_function, local_size: int | None = None,
    allow_is_causal_skip: bool = False, **kwargs: Any,
) -> MaskRule:  # fmt: skip
    """The mask function to register beside an attention function: it keeps the rule instead of a matrix."""
    if mask_function is bidirectional_mask_function:
        raise ValueError("its tokens see later ones, as in an encoder")
    return MaskRule(mask_function, local_size=local_size, plain=allow_is_causal_skip)


def rule_of(module: torch.nn.Module, attention_mask: Any) -> MaskRule:
    """The rule that reached an attention function in place of its mask; ValueError for any other mask."""
    if attention_mask is None and getattr(module, "is_causal", True):
        return CAUSAL
    if not isinstance(attention_mask, MaskRule):
        found = "no mask and is not causal" if attention_mask is None else "a mask of its own making"
        raise ValueError(f"{type(module).__name__} has {found}: what it hides is known to that model's code alone")
    return attention_mask


def register(name: str) -> None:
    """Let models whose attention implementation is `name` hand their rules on."""
    AttentionMaskInterface.register(name, keep_rule)


# torch 2.11 and later prefers cuDNN on Hopper and Blackwell, which builds a plan for every new shape, in every thread,
# and keeps it: up to half a second for each micro-batch and every few decoded tokens. flash needs no plan.
torch.backends.cuda.enable_cudnn_sdp(False)

_APPLIED = {"softcap": "softcap", "s_aux": "sinks"}
_NOT_APPLIED = ("position_bias", "alibi", "head_mask", "score_mod", "indices", "topk_indices", "indexer_topk_indices")


def check_extras(module: torch.nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a layer's changes of its scores to keywords of `attend`; ValueError for one that is not known here."""
    for name in _NOT_APPLIED:
        if keywords.get(name) is not None:
            raise ValueError(f"{type(module).__name__} changes its attention scores by `{name}`")
    return {ours: keywords[name] for name, ours in _APPLIED.items() if keywords.get(name) is not None}


def attend(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, K, T, D], K divides H
    value: Tensor,  # [B, K, T, E]
    *,
    mask: Tensor | None,  # bool or additive, broadcasts to [B, H, Q, T]; None: causal, Q = T
    scaling: float | None = None,
    softcap: float | None = None,  # scores are capped at this, smoothly, before the mask
    sinks: Tensor | None = None,  # [H], or [H * Q]: score of one more key, whose value is 0
    fused: bool = True,  # by one kernel, where it can
) -> Tensor:
    """[B, H, Q, E]. Scores are scaled by `scaling`, or by 1 / sqrt(D)."""
    shared = query.shape[1] // key.shape[1]
    plain = softcap is None and sinks is None and fused
    gqa = shared > 1 and query.is_cuda and plain
    if shared > 1 and not gqa:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    if plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    column = sinks.reshape(1, query.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(value.dtype) @ value
