"""Several objectives at once, every one as larger-is-better: `objectives` is [N, K], N points with K values.

Points are per-trajectory reward components, scalarized before the estimator, or entries of an archive of evaluations. A
constant added to a loss has no gradient, so nothing here is a loss. All results are detached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_shape, float_dtype, require

__all__ = [
    "crowding_distance", "domination_count", "hypervolume", "hypervolume_contributions", "overlong_penalty",
    "tchebycheff", "weighted_sum",
]


_Point = tuple[float, ...]


@torch.no_grad()
def weighted_sum(objectives: Tensor, weights: Tensor) -> Tensor:
    """`sum_k w_k f_k`, [N]; `weights` [K]."""
    _check(objectives, weights=weights)
    dtype = float_dtype(objectives, weights)
    return objectives.to(dtype) @ weights.to(dtype)


@torch.no_grad()
def tchebycheff(objectives: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    """`-max_k w_k abs(f_k - z_k)`, [N], at most 0; `weights` [K], `ideal` z [K]. Reaches non-convex fronts too."""
    _check(objectives, weights=weights, ideal=ideal)
    dtype = float_dtype(objectives, weights, ideal)
    return -(weights.to(dtype) * (objectives.to(dtype) - ideal.to(dtype)).abs()).amax(1)


@torch.no_grad()
def domination_count(objectives: Tensor) -> Tensor:
    """The number of points that dominate each point (nowhere worse, somewhere better), int64 [N]; 0 is the front."""
    _check(objectives)
    ours, theirs = objectives[:, None, :], objectives[None, :, :]
    return ((theirs >= ours).all(-1) & (theirs > ours).any(-1)).sum(1)


@torch.no_grad()
def crowding_distance(objectives: Tensor) -> Tensor:
    """Sum over objectives of the gap between a point's neighbors, as a share of the range; [N].

    inf at either end of any objective that varies. Prune the smallest first. Deb et al. 2002, NSGA-II, section III-B.
    """
    _check(objectives)
    num_points = objectives.shape[0]
    distance = torch.zeros(num_points, dtype=float_dtype(objectives), device=objectives.device)
    if num_points == 0:
        return distance
    ordered, order = objectives.to(distance.dtype).sort(dim=0, stable=True)
    for column, index in zip(ordered.unbind(1), order.unbind(1), strict=True):
        extent = column[-1] - column[0]
        if extent == 0:
            continue
        gaps = torch.full_like(column, torch.inf)
        gaps[1:-1] = (column[2:] - column[:-2]) / extent
        distance.index_add_(0, index, gaps)
    return distance


@torch.no_grad()
def hypervolume(objectives: Tensor, reference: Tensor) -> float:
    """Volume of the union of the boxes between `reference` [K] and each point; exact, for K = 2 to 4.

    Points that do not exceed the reference everywhere add nothing.
    """
    return _volume(_front(_above(objectives, reference)))


@torch.no_grad()
def hypervolume_contributions(objectives: Tensor, reference: Tensor) -> Tensor:
    """`HV(S) - HV(S without x)` for each point, [N]; 0 for dominated and for duplicated points."""
    points = _above(objectives, reference)
    alone = [_exclusive(point, points[:i] + points[i + 1 :]) for i, point in enumerate(points)]
    return torch.tensor(alone, dtype=float_dtype(objectives), device=objectives.device)


def _check(objectives: Tensor, **per_objective: Tensor) -> None:
    require(objectives.dim() == 2, f"objectives has shape {list(objectives.shape)}, expected [N, K]")
    check_shape(objectives.shape[1:], "objectives", objectives, "expected [K] and [N, K]", **per_objective)


def _above(objectives: Tensor, reference: Tensor) -> list[_Point]:
    """Extents of the boxes above the reference; empty boxes have a 0 somewhere."""
    _check(objectives, reference=reference)
    num_objectives = objectives.shape[1]
    require(2 <= num_objectives <= 4, f"objectives has K={num_objectives} columns, hypervolume is exact for 2 to 4")
    extents = (objectives.double() - reference.double()).clamp(min=0.0)
    return [tuple(row) for row in extents.tolist()]


def _front(points: list[_Point]) -> list[_Point]:
    """The distinct non-dominated boxes of positive volume, largest first objective first."""
    kept: list[_Point] = []
    # In descending lexicographic order a point can only be dominated by an earlier one.
    for point in sorted(set(points), reverse=True):
        if min(point) > 0.0 and not any(all(a >= b for a, b in zip(other, point, strict=True)) for other in kept):
            kept.append(point)
    return kept


def _volume(front: list[_Point]) -> float:
    """Volume of the union of the boxes of a front: each adds what the later ones leave uncovered."""
    if front and len(front[0]) == 2:
        # Descending in f1, hence ascending in f2: every point adds one slab.
        total, reached = 0.0, 0.0
        for first, second in front:
            total += first * (second - reached)
            reached = second
        return total
    return sum(_exclusive(point, front[i + 1 :]) for i, point in enumerate(front))


def _exclusive(point: _Point, others: list[_Point]) -> float:
    """Volume of the point's box outside the others': the box minus the union of the others cut down to it."""
    overlaps = [tuple(min(a, b) for a, b in zip(point, other, strict=True)) for other in others]
    return math.prod(point) - _volume(_front(overlaps))


@torch.no_grad()
def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, cache_tokens: int) -> Tensor:
    """Soft overlong penalty in [-1, 0], [B]: 0 up to `max - cache`, then linear to -1 at `max`, -1 beyond.

    Add it to the score, times a scale. DAPO, arXiv:2503.14476, eq. 13.
    """
    require(max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1")
    require(
        0 <= cache_tokens <= max_tokens,
        f"cache_tokens={cache_tokens} and max_tokens={max_tokens} must satisfy 0 <= cache_tokens <= max_tokens",
    )
    require(num_tokens.dim() == 1, f"num_tokens has shape {list(num_tokens.shape)}, expected [B]")
    lengths = num_tokens.to(torch.promote_types(torch.float32, num_tokens.dtype))
    free = max_tokens - cache_tokens
    inside = (free - lengths) / max(cache_tokens, 1)
    penalty = torch.where(lengths > max_tokens, torch.full_like(lengths, -1.0), inside.clamp(-1.0, 0.0))
    return torch.where(lengths <= free, torch.zeros_like(lengths), penalty)
