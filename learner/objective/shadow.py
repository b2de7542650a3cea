"""Shadow algorithms: the gradients that others would have on the batch that one trains on, from its forward pass.

A policy loss is a pure function of the policy's log-probs, so its gradient with respect to them costs a graph over the
action tokens, and no pass through the model. Compared is the policy term at the batch's first optimizer step:
advantages, masks, corrections, surrogate and the weights of tokens. Rewards, the treatment of old tokens and what
shapes rewards or advantages by the KL are the run's; terms that are added to the loss are left out on both sides.
Nothing here reaches the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from learner.objective import plan_tensors
from learner.objective.loss import policy_term
from learner.objective.objective import Objective
from learner.objective.plan import BatchPlan
from learner.objective.scoring_pass import with_outputs
from learner.objective.token_batch import TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.algorithms import aggregate
from streamrl.metrics.meter import Meter
from streamrl.metrics.names import of_set

AGES = (0, *(2**power for power in range(15)))
"""The smallest lag of each bin: they double, so that the lags of any run are told apart in a few of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Shadow:
    """An algorithm to compare with: its name in the metrics, its functions, and the constants of its surrogate."""

    name: str
    objective: Objective
    options: Mapping[str, Any]


def add_shadows(
    meter: Meter, shadows: Sequence[Shadow], plan: BatchPlan, scored: BatchPlan, seen: Sequence[TokenBatch],
    ranks: Ranks,
) -> None:
    """Add the metrics of every shadow, and under no name those of the algorithm in use; a collective call.

    Args:
        plan, scored: of the algorithm in use, before and after its scoring pass.
        seen: micro-batches of the batch's first optimizer step, under the policy before it.
    """
    plans = [scored, *(shadow_plan(shadow, plan, seen, ranks) for shadow in shadows)]
    sums = [_sums(tokens, plans) for tokens in seen]
    mine = torch.stack(sums).sum(0) if sums else torch.zeros(len(plans), len(AGES), 5, dtype=torch.float64)
    total = torch.tensor(ranks.all_reduce(mine.flatten().tolist()), dtype=torch.float64).view(mine.shape)
    # The sums are of all ranks already, and the meters of all ranks are added up later: one of them takes the sums.
    if ranks.rank == 0:
        for name, found in zip(["", *(shadow.name for shadow in shadows)], total, strict=True):
            _add(meter, name, found, total[0])


def shadow_plan(shadow: Shadow, plan: BatchPlan, seen: Sequence[TokenBatch], ranks: Ranks) -> BatchPlan:
    """The run's plan as the shadow would have made it, with what it fits to the batch; a collective call."""
    objective, tensors = shadow.objective, plan.tensors
    if objective.loss.avg_level != plan.objective.loss.avg_level:
        mask = plan.objective.group_mask
        made = plan_tensors.of_plan(
            plan.rows, plan.batch, ranks, avg_level=objective.loss.avg_level, max_new_tokens=objective.max_new_tokens,
            filter_truncated=plan.objective.filter_truncated,
            passed=None if mask is None else mask(plan.recorded, plan.batch, ranks),
        )
        # The rewards that are trained on, and which answers are siblings, do not depend on the algorithm.
        tensors = replace(tensors, weights=made.weights)
    rows = plan_tensors.row_advantages(
        tensors, objective.advantage, objective.estimator,
        lambda: plan_tensors.return_moments(plan.rows, objective.advantage, ranks),
    )
    ours = replace(plan, objective=objective, options=shadow.options, tensors=tensors, row_advantages=rows)
    observed = [(tokens.micro, replace(tokens.outputs, policy=tokens.policy)) for tokens in seen]
    return with_outputs(ours, observed, ranks)


def token_gradient(tokens: TokenBatch, plan: BatchPlan) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the policy term with respect to each token's log-prob; kept and clipped tokens; all [S, A]."""
    with torch.enable_grad():
        policy = tokens.policy.detach().requires_grad_()
        terms = policy_term(plan.tokens(tokens.micro, policy), plan)
        weights = plan.of_rows(plan.tensors.weights, tokens.micro)
        loss = aggregate(terms.losses, tokens.mask, keep=terms.masks.keep, row_weights=weights)
        # Where every token is masked or without advantage no graph is left: its gradient is 0.
        found = torch.autograd.grad(loss, policy, allow_unused=True)[0] if loss.requires_grad else None
    return torch.zeros_like(policy) if found is None else found, terms.masks.keep, terms.clipped


def _sums(tokens: TokenBatch, plans: Sequence[BatchPlan]) -> Tensor:
    """Tokens, kept ones, clipped ones, squares, and products with the first plan's: float64 [plans, ages, 5]."""
    mask, device = tokens.mask, tokens.mask.device
    # Over padding, too, where all is 0: to select tokens would wait for the device.
    ages = torch.bucketize(tokens.lags.flatten(), torch.tensor(AGES, device=device), right=True) - 1
    sums = torch.zeros(len(plans), len(AGES), 5, dtype=torch.float64, device=device)
    in_use = None
    for row, plan in zip(sums, plans, strict=True):
        gradient, kept, clipped = token_gradient(tokens, plan)
        slope = gradient.double() * mask
        in_use = slope if in_use is None else in_use
        of_token = [mask.double(), kept.double(), (clipped & mask).double(), slope.square(), slope * in_use]
        row.index_add_(0, ages, torch.stack([one.flatten() for one in of_token], dim=1))
    return sums


def _add(meter: Meter, name: str, found: Tensor, in_use: Tensor) -> None:
    """Metrics of one algorithm from sums [ages, 5], of the whole batch and by age."""
    for key, value in _values(found.sum(0).tolist(), in_use.sum(0).tolist()).items():
        meter.add(of_set(f"shadow/{key}", name), value)
    for age, one, other in zip(AGES, found.tolist(), in_use.tolist(), strict=True):
        if one[0]:
            for key, value in _values(one, other).items():
                meter.add_at(of_set(f"shadow/{key}_by_lag", name), age, value)


def _values(found: Sequence[float], in_use: Sequence[float]) -> dict[str, float]:
    count, kept, clipped, square, product = found
    values = {
        "grad_norm": math.sqrt(square), "kept_fraction": kept / max(count, 1), "clip_fraction": clipped / max(count, 1),
    }
    length = math.sqrt(square) * math.sqrt(in_use[3])
    if length != 0:  # a gradient of zeros has no direction
        values["cosine"] = product / length
    return values
