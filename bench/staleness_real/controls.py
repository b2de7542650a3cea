"""Control arms of `vtrace`: is it the masked tokens that matter, or only how many there are, or their sign?

Surrogates of a user's own, as docs/own_algorithm.md describes them; the ratio is in the estimator's advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms import Surrogate, opsm_keep


def _random_mask(
    policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float = 0.05
) -> Tensor:
    """REINFORCE without as many tokens as OPSM would leave out, drawn at random from each micro-batch."""
    ratios = torch.where(mask, policy_logprobs.detach() - behavior_logprobs, 0.0)
    count = int((mask & ~opsm_keep(ratios, advantages, mask, delta=delta)).sum())
    order = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, 2.0).flatten().argsort()
    keep = torch.ones_like(mask).flatten().index_fill(0, order[:count], False).reshape(mask.shape)
    return -advantages * policy_logprobs * keep


def _positive_only(policy_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE on the tokens with a positive advantage."""
    return -advantages.clamp(min=0.0) * policy_logprobs


random_mask = Surrogate(_random_mask, weighs=False)
positive_only = Surrogate(_positive_only, weighs=False)
