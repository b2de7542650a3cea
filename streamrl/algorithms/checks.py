"""The tensor contract that every function of the package obeys.

Rows are trajectories, positions are tokens: [B, T] tensors and a bool `mask` that is True on action tokens. Masked
positions are replaced by 0 before anything reads them, so NaN there can reach neither a value nor a gradient (0 times
NaN would). Computation is in the widest input dtype, at least float32. Wrong shapes and impossible knobs raise
`ValueError`; no error depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LOG_BOUND = 20.0  # nats; clamp of token log-ratios, and of their row sums before exp


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition`: for knobs and shapes, never for data."""
    if not condition:
        raise ValueError(message)


def float_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype of the inputs, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def check_mask(mask: Tensor) -> None:
    """Raise `ValueError` unless `mask` is bool [B, T]."""
    require(mask.dtype == torch.bool, f"mask has dtype {mask.dtype}, expected torch.bool")
    require(mask.dim() == 2, f"mask has shape {list(mask.shape)}, expected [B, T]")


def check_shape(shape: torch.Size, name: str, like: Tensor, expected: str, /, **tensors: Tensor) -> None:
    """Raise `ValueError` unless every tensor has `shape`, which follows from the tensor `like` called `name`."""
    for other, tensor in tensors.items():
        found = f"{other} has shape {list(tensor.shape)} but {name} has shape {list(like.shape)}"
        require(tensor.shape == shape, f"{found}: {expected}")


def check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    """Raise `ValueError` unless every tensor has the shape of `mask`."""
    check_mask(mask)
    check_shape(mask.shape, "mask", mask, "both must be [B, T]", **tensors)


def check_rows(mask: Tensor, **tensors: Tensor) -> None:
    """Raise `ValueError` unless every tensor is [B], one entry per row of `mask`."""
    check_mask(mask)
    check_shape(mask.shape[:1], "mask", mask, "expected [B] and [B, T]", **tensors)


def check_alike(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all tensors have the shape of the first, which must be [B]."""
    name, first = next(iter(tensors.items()))
    require(first.dim() == 1, f"{name} has shape {list(first.shape)}, expected [B]")
    check_shape(first.shape, name, first, "both must be [B]", **tensors)


def only(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where `mask`, exactly 0 elsewhere; safe against NaN in value and in gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def read(mask: Tensor, **tensors: Tensor) -> list[Tensor]:
    """The [B, T] tensors at one float dtype, checked, with masked positions set to 0. Keeps gradients."""
    check_tokens(mask, **tensors)
    dtype = float_dtype(*tensors.values())
    return [only(mask, tensor.to(dtype)) for tensor in tensors.values()]


def read_log_ratios(mask: Tensor, log_ratios: Tensor) -> Tensor:
    """Log-ratios, checked, 0 at masked positions and clamped; NaN at an action token stays NaN."""
    (values,) = read(mask, log_ratios=log_ratios)
    return values.clamp(-LOG_BOUND, LOG_BOUND)


def clamped_difference(older: Tensor, newer: Tensor) -> Tensor:
    """`newer - older`, clamped to +-LOG_BOUND: the log-ratio of log-probs that were read, hence 0 off the mask."""
    return (newer - older).clamp(-LOG_BOUND, LOG_BOUND)


def row_counts(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Number of action tokens per row, [B], at least 1 so that it can divide a row's sum of zeros."""
    return mask.sum(1).clamp(min=1).to(dtype)


def discounts(gamma: float | Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """gamma as [B, T], 1 at masked positions: recursions cross gaps without discount."""
    one = torch.ones((), dtype=dtype, device=mask.device)
    if isinstance(gamma, Tensor) and gamma.dim() > 0:
        check_tokens(mask, gamma=gamma)
        return torch.where(mask, gamma.detach().to(dtype), one)
    require(0.0 <= float(gamma) <= 1.0, f"gamma={gamma} must lie in [0, 1]")
    return torch.where(mask, one * float(gamma), one)


def fits(value: Any, shape: Sequence[int], *, is_bool: bool = False) -> bool:
    """Whether a user's function returned a tensor of this shape, of bools or of floats."""
    if not isinstance(value, Tensor) or list(value.shape) != list(shape):
        return False
    return value.dtype == torch.bool if is_bool else value.is_floating_point()


def described(value: Any) -> str:
    """Say what a user's function returned."""
    if isinstance(value, Tensor):
        return f"a Tensor of {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    return "nothing (is a `return` missing?)" if value is None else f"a {type(value).__name__}"


def name_of(function: Callable[..., Any]) -> str:
    """A user's function as a setting names it."""
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
