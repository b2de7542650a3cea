"""AdamW with moments in 8 bits, sharded as the weights are: a checkpoint of some ranks is resumed by any other number.

Blocks of a row share a scale (block-wise quantization: Dettmers et al. 2022, arXiv 2110.02861); the numbers are float8
with four bits of exponent. Kept are the first moment and the root of the second, which spans half as many decades.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from learner.ranks.mesh import local_part, placed_as

FLOAT8 = torch.float8_e4m3fn
LARGEST, SMALLEST = torch.finfo(FLOAT8).max, 2.0**-9
BLOCK, FEWEST = 256, 32
"""Numbers that share a scale: the greatest common divisor of a row and 256. Below 32, moments stay in float32."""


class AdamW8bit(Optimizer):
    """AdamW (Loshchilov & Hutter 2019). Vectors keep their moments in float32, as do rows without even blocks."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local_part(parameter.grad).float(), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        first, root = _read(state, "exp_avg", gradient), _read(state, "exp_avg_root", gradient)
        first.lerp_(gradient, 1 - beta1)
        root.square_().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        state["step"] = state.get("step", torch.zeros(())) + 1
        _write(state, "exp_avg", first, parameter)
        _write(state, "exp_avg_root", root, parameter)

        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        weight = local_part(parameter.detach())
        denominator = root.div_(correction2.sqrt()).add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(first.div_(denominator).mul_(group["lr"] / correction1))


def _block(shape: Sequence[int]) -> int:
    """How many numbers of a row share a scale; 0 for moments in float32."""
    block = math.gcd(shape[-1], BLOCK) if len(shape) > 1 else 0
    return block if block >= FEWEST else 0


def _read(state: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """This rank's part of a moment, in float32: a copy; zeros before the first step."""
    if name not in state:
        return torch.zeros_like(like)
    held = local_part(state[name])
    block = _block(held.shape)
    if not block:
        return held.clone()
    numbers = held.view(FLOAT8).float().unflatten(-1, (-1, block))
    return numbers.mul_(local_part(state[f"{name}_scale"]).unsqueeze(-1)).flatten(-2)


def _write(state: dict[str, Any], name: str, moment: Tensor, parameter: Tensor) -> None:
    """Keep a moment. What is not 0 does not become 0 in a root: it is divided by."""
    block = _block(moment.shape)
    if not block:
        state[name] = placed_as(parameter, moment.clone())
        return
    numbers = moment.unflatten(-1, (-1, block))
    scale = numbers.abs().amax(-1).div_(LARGEST)
    numbers = numbers / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    if name.endswith("root"):
        numbers = torch.where(numbers > 0, numbers.clamp(min=SMALLEST), numbers)
    state[name] = placed_as(parameter, numbers.to(FLOAT8).flatten(-2).view(torch.uint8))
    state[f"{name}_scale"] = placed_as(parameter, scale)
