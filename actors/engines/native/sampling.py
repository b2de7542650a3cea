"""Sampling of tokens from logits, each with the log-probability that it was drawn with.

A row is processed in this order: divide by the temperature, keep the top-k, renormalize and keep the smallest prefix
that holds top-p of the mass, drop what is below min-p times the largest, renormalize. Log-probs are of this final
distribution. Temperature 0 takes the largest logit, with log-prob 0.0.

The draw inverts the cumulative distribution at a hash of (seed, position), `streamrl.messages.seeding`, so that it does
not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.messages import Sampling
from streamrl.messages.validate import LARGEST_SET
from streamrl.weights.gpu.pinned import upload

_BLOCK = 512  # ids
_PIECE, _PIECE_CUDA = 1 << 21, 1 << 24
"""Logits that are looked at together, for each thread or on a GPU: few at a time, in memory that is used again.

A GPU gets more because each piece is some 25 kernels to launch.
"""


class SamplingPlan:
    """The sampling parameters of n rows as tensors; rebuilt only when the rows change."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> None:
        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return upload(torch.tensor(values, dtype=dtype), torch.device(device))[:, None]

        def where(flags: list[bool]) -> Tensor | None:
            rows = [row for row, flag in enumerate(flags) if flag]
            return upload(torch.tensor(rows), torch.device(device)) if rows else None

        self._samplings, self._device = samplings, device
        self._parts: dict[tuple[int, int], SamplingPlan] = {}
        self.greedy_rows = where([s.temperature == 0.0 for s in samplings])
        self.all_greedy = all(s.temperature == 0.0 for s in samplings)
        temperatures = [s.temperature if s.temperature > 0.0 else 1.0 for s in samplings]
        self.temperatures = column(temperatures) if any(t != 1.0 for t in temperatures) else None

        ranked = [s for s in samplings if _is_ranked(s)]
        self.ranked_rows = where([_is_ranked(s) for s in samplings])
        # top_p = 1 becomes 2: a cumulative sum may reach 1.0 by rounding before the last token.
        self.top_p = column([s.top_p if s.top_p < 1.0 else 2.0 for s in ranked], torch.float64)
        self.top_k = column([s.top_k if s.top_k > 0 else 1 << 62 for s in ranked], torch.int64)
        self.ranked_width = max((s.top_k for s in ranked), default=0) if all(s.top_k > 0 for s in ranked) else 0

        floored = [s for s in samplings if s.min_p > 0.0]
        self.floored_rows = where([s.min_p > 0.0 for s in samplings])
        self.log_min_p = column([math.log(s.min_p) for s in floored])
        # Without top-k a set may be the whole vocabulary; training always has one (`max_kept`).
        self.bounded = [row for row, s in enumerate(samplings) if 0 < s.top_k <= LARGEST_SET and s.temperature > 0.0]

    def part(self, first: int, end: int) -> SamplingPlan:
        """The plan of rows first..end (half open)."""
        if self is _PLAIN_PLAN:
            return self
        if (first, end) not in self._parts:
            self._parts[first, end] = SamplingPlan(self._samplings[first:end], self._device)
        return self._parts[first, end]


def _is_ranked(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0


_PLAIN = Sampling()
_PLAIN_PLAN = SamplingPlan([_PLAIN])  # names no row: one for any number of them


def make_plan(samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingPlan:
    """The plan of these rows; the usual one, every token at temperature 1, is made once."""
    plain = all(sampling is _PLAIN or sampling == _PLAIN for sampling in samplings)
    return _PLAIN_PLAN if plain else SamplingPlan(samplings, device)


def processed_logprobs(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Log-probs of the distribution drawn from: [n, vocab] float32, -inf where cut off; greedy rows as at 1."""
    scores = logits.float()
    if plan.temperatures is not None:
        scores = scores / plan.temperatures
    if plan.ranked_rows is not None or plan.floored_rows is not None:
        scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
    if plan.ranked_rows is not None:
        scores[plan.ranked_rows] = _keep_ranked(scores[plan.ranked_rows], plan)
    if plan.floored_rows is not None:
        rows = scores[plan.floored_rows]
        floor = rows.amax(dim=-1, keepdim=True) + plan.log_min_p
        scores[plan.floored_rows] = rows.masked_fill(rows < floor, float("-inf"))
    return torch.log_softmax(scores, dim=-1)


def _keep_ranked(scores: Tensor, plan: SamplingPlan) -> Tensor:
    """Top-k, then top-p over the rest."""
    width = min(plan.ranked_width, scores.shape[-1])
    ranked, order = scores.topk(width, dim=-1) if width else scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[-1], device=scores.device)
    kept = ranks < plan.top_k
    probs = torch.softmax(ranked.double().masked_fill(~kept, float("-inf")), dim=-1)
    # A token stays if the mass strictly before it is below top-p; so the one that crosses the line stays too.
    kept &= probs.cumsum(dim=-1) - probs < plan.top_p
    return torch.full_like(scores, float("-inf")).scatter_(-1, order, ranked.masked_fill(~kept, float("-inf")))


class Drawn(NamedTuple):
    """Sampled tokens, one per row."""

    tokens: Tensor  # int64 [n]
    logprobs: Tensor  # float32 [n] under the processed distribution; NaN where logits are
    sets: Mapping[int, np.ndarray]  # row -> the ids that are left, of each row with a top-k


def draw(logits: Tensor, plan: SamplingPlan, uniforms: np.ndarray) -> Drawn:
    """Sample a token per row: logits [n, vocab] of any float type, uniforms [n] float64 in [0, 1)."""
    if plan.all_greedy:
        tokens = logits.argmax(dim=-1)
        peak = logits.gather(-1, tokens[:, None])[:, 0].float()
        return Drawn(tokens, peak - peak, {})  # 0.0, but NaN stays NaN
    if logits.is_cuda:
        size = _PIECE_CUDA
    else:
        size = _PIECE * torch.get_num_threads()
    count = max(1, size // logits.shape[-1])
    if len(logits) <= count:
        return _draw_piece(logits, plan, uniforms)
    bounds = [(first, min(first + count, len(logits))) for first in range(0, len(logits), count)]
    drawn = [_draw_piece(logits[a:b], plan.part(a, b), uniforms[a:b]) for a, b in bounds]
    return Drawn(
        tokens=torch.cat([piece.tokens for piece in drawn]),
        logprobs=torch.cat([piece.logprobs for piece in drawn]),
        sets={a + row: ids for (a, _), piece in zip(bounds, drawn, strict=True) for row, ids in piece.sets.items()},
    )


def _draw_piece(logits: Tensor, plan: SamplingPlan, uniforms: np.ndarray) -> Drawn:
    logprobs = processed_logprobs(logits, plan)
    tokens = _invert(logprobs.exp(), upload(torch.from_numpy(uniforms), logprobs.device)[:, None])
    picked = logprobs.gather(-1, tokens)[:, 0]
    tokens = tokens[:, 0]
    if plan.greedy_rows is not None:
        rows = logits[plan.greedy_rows]
        tokens[plan.greedy_rows] = rows.argmax(dim=-1)
        peak = rows.amax(dim=-1).float()
        picked[plan.greedy_rows] = peak - peak
    return Drawn(tokens, picked, _kept(logprobs, plan.bounded))


def _kept(logprobs: Tensor, rows: list[int]) -> dict[int, np.ndarray]:
    if not rows:
        return {}
    owner, ids = (logprobs[rows] > float("-inf")).nonzero(as_tuple=True)
    ends = torch.bincount(owner, minlength=len(rows)).cumsum(0).tolist()
    return dict(zip(rows, np.split(ids.cpu().numpy(), ends[:-1]), strict=True))


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The id at which the cumulative distribution exceeds a share of its total: probs [n, vocab], uniforms [n, 1].

    First among the sums of blocks of ids, then among the ids of that block: for 64 rows of 49,152 ids one cumulative
    sum took 14 ms on a CPU core, this 3 ms.
    """
    count = probs.shape[-1]
    if count <= _BLOCK:
        cumulative = probs.double().cumsum(dim=-1)
        return _first_above(cumulative, uniforms * cumulative[:, -1:])
    whole = count // _BLOCK * _BLOCK
    sums = [probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)]
    if whole < count:
        sums.append(probs[:, whole:].sum(dim=-1, keepdim=True))
    of_blocks = torch.cat(sums, dim=-1).double()
    cumulative = of_blocks.cumsum(dim=-1)
    targets = uniforms * cumulative[:, -1:]
    block = _first_above(cumulative, targets)
    rest = targets - (cumulative - of_blocks).gather(-1, block)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, ids.clamp(max=count - 1)).double().masked_fill_(ids >= count, 0.0)
    place = _first_above(inside.cumsum(dim=-1), rest.clamp_(min=0.0))
    return (block * _BLOCK + place).clamp_(max=count - 1)


def _first_above(cumulative: Tensor, targets: Tensor) -> Tensor:
    """Place [n, 1] of the first entry of each row [n, m] above its target. What adds nothing is never the first."""
    # A target that rounding has moved to the total, or above, would find nothing.
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros((), dtype=cumulative.dtype, device=cumulative.device))
    found = torch.searchsorted(cumulative, torch.minimum(targets, below_total), right=True)
    return found.clamp_(max=cumulative.shape[-1] - 1)
