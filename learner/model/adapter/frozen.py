"""A frozen policy in a run that trains an adapter: another adapter on the same base, so no second copy of the weights.

The reference of a KL term starts as the base alone: an adapter whose second factors are 0 adds exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from learner.checkpoint.shards import reshard
from learner.data.packing import MicroBatch
from learner.model.adapter.lora import UP_FACTOR
from learner.model.policy import Policy
from learner.model.reference import FrozenPolicy
from learner.ranks.mesh import local_part


class FrozenAdapter(FrozenPolicy):
    """Factors of its own, put in the place of the policy's while it scores.

    Args:
        policy: shared with the run; it is trained on meanwhile.
        off: start as the base alone, not as the policy.
    """

    def __init__(self, policy: Policy, *, name: str, off: bool) -> None:
        self.name, self._policy = name, policy
        self._own = {
            key: parameter.detach().clone() for key, parameter in policy.named_parameters() if parameter.requires_grad
        }
        for key, factor in self._own.items():
            if off and UP_FACTOR in key:
                factor.zero_()

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> Tensor:
        with self._in_place():
            return super().score(batch)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"frozen/{self.name}/{key}", factor) for key, factor in self._own.items())

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        pairs = list(self._pairs(self._policy))
        theirs = [other.clone() for _, other in pairs]
        for mine, other in pairs:
            other.copy_(mine)
        try:
            yield
        finally:
            reshard(self._policy)
            for (_, other), before in zip(pairs, theirs, strict=True):
                other.copy_(before)

    def _pairs(self, source: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        reshard(source)
        theirs = dict(source.named_parameters())
        for key, factor in self._own.items():
            mine, other = local_part(factor), local_part(theirs[key].detach())
            if mine.numel():
                yield mine, other
