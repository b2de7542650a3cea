"""Adam and gradient clipping for stacked members: each has its own moments, its own norm and its own learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
EPS = 1e-8
MAX_GRAD_NORM = 1.0


class MemberAdam:
    """Adam on parameters [E, P], with the norm of each member's gradient clipped to MAX_GRAD_NORM first."""

    def __init__(self, parameters: Tensor) -> None:
        self._mean = torch.zeros_like(parameters)
        self._square = torch.zeros_like(parameters)
        self._count = torch.zeros(parameters.shape[0], 1)

    @torch.no_grad()
    def step(self, parameters: Tensor, gradient: Tensor, lr: Tensor, active: Tensor | None = None) -> Tensor:
        """Update `parameters` in place; returns the norms before clipping, [E].

        `lr` [E]. Members where `active` (bool [E]) is False keep parameters and moments as they are.
        """
        norms = gradient.norm(dim=1)
        # As torch's clip_grad_norm_: the scale never exceeds 1.
        gradient = gradient * (MAX_GRAD_NORM / (norms + 1e-6)).clamp(max=1.0)[:, None]
        mean = self._mean.lerp(gradient, 1.0 - BETAS[0])
        square = BETAS[1] * self._square + (1.0 - BETAS[1]) * gradient.square()
        count = self._count + 1.0
        scale = (square / (1.0 - BETAS[1] ** count)).sqrt_().add_(EPS)
        update = (mean / (1.0 - BETAS[0] ** count)).div_(scale).mul_(lr[:, None])
        if active is not None and not bool(active.all()):
            keep = active[:, None]
            mean, square = torch.where(keep, mean, self._mean), torch.where(keep, square, self._square)
            count, update = torch.where(keep, count, self._count), torch.where(keep, update, torch.zeros_like(update))
        self._mean, self._square, self._count = mean, square, count
        parameters.sub_(update)
        return norms
