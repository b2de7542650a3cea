"""The surrogate: which loss every token contributes, and against whom its ratio is taken.

The denominator of a ratio is the recorded behavior log-prob, or a proximal policy that stands between it and the
current one: `recomputed` (the policy before this update), `loglinear` (on the way from one to the other), `ewma` (a
moving average of the policy's weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from learner.data.packing import MicroBatch
from streamrl.algorithms import SURROGATES, loglinear_proximal
from streamrl.algorithms.types import ClipBounds, TokenLoss

EWMA = "ewma"


def anchor_of(surrogate: str, chosen: str | None) -> str:
    """Name of the anchor: the chosen one, or what the surrogate takes if nobody chose."""
    if chosen is not None:
        return chosen
    return {"decoupled_ppo": "loglinear", "reinforce": "none"}.get(surrogate, "behavior")


def proximal_logprobs(
    anchor: str, batch: MicroBatch, policy: Tensor, lags: Tensor, *, before: Tensor | None, average: Tensor | None
) -> Tensor | None:
    """[S, A] log-probs of the proximal policy, detached; None if there is none.

    Args:
        before: of the policy before the update, if a scoring pass saw it; else the current ones are the same.
        average: of the averaged policy.
    """
    if anchor == "loglinear":
        return loglinear_proximal(batch.behavior_logprobs, policy.detach(), lags, batch.mask)
    if anchor == "recomputed":
        return policy.detach() if before is None else before
    return average if anchor == EWMA else None


def surrogate_loss(
    name: str, options: Mapping[str, Any], batch: MicroBatch, policy: Tensor, advantages: Tensor, *,
    proximal: Tensor | None, bounds: ClipBounds | None,
) -> TokenLoss:
    """Losses [S, A] of one micro-batch.

    Args:
        bounds: of the whole batch, for `m2po`.
    """
    surrogate, behavior, mask = SURROGATES[name], batch.behavior_logprobs, batch.mask
    if name == "reinforce":
        return surrogate(policy, advantages, mask)
    if name == "decoupled_ppo":
        return surrogate(behavior, proximal, policy, advantages, mask, **options)
    if name == "ppo_clip":
        return surrogate(behavior if proximal is None else proximal, policy, advantages, mask, **options)
    if name == "m2po":
        assert bounds is not None, "m2po: run score_batch() before the first forward_backward()"
        return surrogate(behavior, policy, advantages, mask, bounds=bounds, **options)
    return surrogate(behavior, policy, advantages, mask, **options)
