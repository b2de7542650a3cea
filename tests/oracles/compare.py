"""How the batches of the unit tests get into an oracle and how its answer is compared."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.unit.algorithms.rows import Rows, random_rows

SEEDS = range(5)


def batches(**knobs: Any) -> Iterator[Rows]:
    """Random float64 rows with gaps, padding on both sides, one row of a single token and one without any."""
    for seed in SEEDS:
        yield random_rows(seed, **knobs)


def as_tensor(result: Any) -> Tensor:
    return result.detach() if isinstance(result, Tensor) else torch.from_numpy(numpy.array(result))


def agree(ours: Tensor, theirs: Any, within: float = 1e-12) -> None:
    """`within` is absolute, or relative to the largest number where that exceeds 1."""
    expected = as_tensor(theirs)
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    gap = (ours.detach() - expected).abs().max().item()
    assert gap <= within * max(1.0, expected.abs().max().item()), f"off by {gap:.3g}"


def row_by_row(rows: Rows, oracle: Callable[..., tuple[Any, ...]], *names: str) -> list[Tensor]:
    """`oracle` sees the action tokens of one row at a time, as if gaps and padding did not exist.

    It gets float64 arrays [n], one per name, and the row's bootstrap value; its results [n] are put back on the action
    tokens. So the comparison covers our masks although the oracle knows none.
    """
    outputs: list[Tensor] = []
    for i in range(rows.mask.shape[0]):
        here = rows.mask[i]
        if not here.any():
            continue
        arrays = [getattr(rows, name)[i][here].numpy() for name in names]
        results = oracle(*arrays, float(rows.bootstrap[i]))
        outputs = outputs or [torch.zeros(rows.mask.shape, dtype=torch.float64) for _ in results]
        for output, result in zip(outputs, results, strict=True):
            output[i, here] = as_tensor(result).double()
    return outputs


def shifted(values: numpy.ndarray, bootstrap: float) -> numpy.ndarray:
    """V(s_{t+1}) of every token of a row."""
    return numpy.append(values[1:], bootstrap)


def value_and_gradient(loss: Callable[[Tensor], Tensor], policy_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its derivative by the policy log-probs: the derivative shows every token on its own."""
    leaf = policy_logprobs.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    return value.detach(), leaf.grad


def same_loss(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], policy_logprobs: Tensor, within: float = 1e-9
) -> None:
    """Both in value and in gradient."""
    (value, gradient), (their_value, their_gradient) = (value_and_gradient(f, policy_logprobs) for f in (ours, theirs))
    agree(value, their_value, within)
    agree(gradient, their_gradient, within)
