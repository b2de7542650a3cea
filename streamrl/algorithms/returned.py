"""Checks on the result of an estimator or a surrogate; their errors say what to return.

The checks read types, shapes and dtypes, so none waits for a device; the dry run looks for values that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.types import Returns, SegmentReturns, TokenLoss
from streamrl.errors import ConfigError


def checked_losses(found: Any, policy_logprobs: Tensor, function: Callable[..., Any]) -> TokenLoss:
    """The result of a surrogate; bare losses clip nothing. Raises ConfigError."""
    shape = policy_logprobs.shape
    if isinstance(found, Tensor):
        found = TokenLoss(found, torch.zeros(shape, dtype=torch.bool, device=policy_logprobs.device))
    wrong = "" if isinstance(found, TokenLoss) else f"returned {_described(found)}"
    if not wrong and not _fits(found.losses, shape):
        wrong = f"returned losses that are {_described(found.losses)}"
    if not wrong and not _fits(found.clipped, shape, is_bool=True):
        wrong = f"returned `clipped` that is {_described(found.clipped)}"
    if not wrong and torch.is_grad_enabled() and policy_logprobs.requires_grad and not found.losses.requires_grad:
        wrong = "returned losses without a gradient: compute them from policy_logprobs"
    if wrong:
        raise ConfigError(
            f"loss.surrogate={_name(function)} {wrong}; return TokenLoss(losses=[B, T], clipped=bool [B, T]), or the "
            f"losses alone, a float tensor [B, T] (here {list(shape)}) that depends on policy_logprobs."
        )
    return found


def checked_advantages(
    found: Any, shape: Sequence[int], function: Callable[..., Any], *, needs_targets: bool
) -> Tensor | Returns | SegmentReturns:
    """The result of an estimator for inputs of this shape, [B, T] or [P]. Raises ConfigError."""
    letters = "[P]" if len(shape) == 1 else "[B, T]"
    wrong, usual = "", f"a float tensor {letters} (here {list(shape)})"
    if isinstance(found, Returns | SegmentReturns) and len(shape) == 2:
        for name, part in (("advantages", found.advantages), ("targets", found.targets)):
            if not wrong and not _fits(part, shape):
                wrong = f"`{name}` that is {_described(part)}"
    elif not _fits(found, shape) or needs_targets:
        wrong = _described(found)
    if wrong:
        what = f"Returns(advantages, targets), each {usual}, as it reads a critic" if needs_targets else usual
        raise ConfigError(f"advantage.estimator={_name(function)} returned {wrong}; return {what}.")
    return found


def _fits(value: Any, shape: Sequence[int], *, is_bool: bool = False) -> bool:
    if not isinstance(value, Tensor) or list(value.shape) != list(shape):
        return False
    return value.dtype == torch.bool if is_bool else value.is_floating_point()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    return "nothing (is a `return` missing?)" if value is None else f"a {type(value).__name__}"


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
