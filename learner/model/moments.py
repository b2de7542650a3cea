"""Optimizers that differ from torch's in how they keep their moments: in 8 bits, or in host memory.

`AdamW8bit`: moments are sharded as the weights are, so a checkpoint of some ranks is resumed by any other number. A
code is a power of 2^(1/12), counted from the largest of its block. The powers are the same for all blocks and steps,
and a moment becomes one of its two neighbors, each as often as keeps the mean. Rounding to the nearest would lose each
change below half the distance of two codes: with beta2=0.999 a second moment that no longer grows stays 1.3 to 2 times
too large. Blocks that share a scale: Dettmers et al. 2022, arXiv 2110.02861; stochastic rounding: Gupta et al. 2015,
arXiv 1502.02551.

`OffloadedOptimizer`: moments visit the device a few parameters at a time, in the step. It works with any optimizer
whose step treats each parameter by itself and leaves its groups as they are. Between steps `state` holds tensors of the
host, placed as before, which a checkpoint reads and fills as any others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from learner.checkpoint.shards import local_box
from learner.ranks.mesh import local_part, placed_as
from streamrl.errors import CheckpointError

PER_OCTAVE = 12
"""Codes from a number to its double: neighbors are 6 % apart."""
LEVELS = {"exp_avg": 127, "exp_avg_sq": 255}
"""Codes of a moment that are not 0: 10 octaves for the first, which has a sign, and 21 for the second, a square."""
BLOCK, FEWEST, MOST_TENSOR_RANKS = 256, 4, 8
"""Numbers that share a scale. The blocks of a row stay the same when up to eight ranks divide it (learner.mesh.tensor),
so rows that are short or odd have smaller ones; below four numbers the moments stay in float32."""
_STEP, _WITHIN, _ACROSS = 0.6180339887498949, 0.7548776662466927, 0.5698402909980532


class AdamW8bit(Optimizer):
    """AdamW (Loshchilov & Hutter 2019). Vectors keep their moments in float32, as do rows without even blocks.

    Raises:
        ValueError: rows are divided among more ranks than their blocks allow.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            width, block = local_part(parameter.detach()).shape[-1:], block_of(parameter.shape)
            if block and width[0] % block:
                raise ValueError(f"rows of {parameter.shape[-1]} numbers are divided into parts of {width[0]}, which "
                                 f"blocks of {block} do not fill: learner.mesh.tensor is at most {MOST_TENSOR_RANKS}")

    @staticmethod
    def takes(names: set[str]) -> bool:
        """Tell whether states of these names in a checkpoint are its moments, in whichever form."""
        return "exp_avg" in names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local_part(parameter.grad).float(), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        first, second = _read(state, "exp_avg", gradient), _read(state, "exp_avg_sq", gradient)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["step"] = state.get("step", torch.zeros(())) + 1
        _write(state, "exp_avg", first, parameter)
        _write(state, "exp_avg_sq", second, parameter)

        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        weight = local_part(parameter.detach())
        denominator = second.div_(correction2).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(first.div_(denominator).mul_(group["lr"] / correction1))


def block_of(shape: Sequence[int]) -> int:
    """How many numbers of a row of a whole parameter share a scale; 0 for moments in float32."""
    even = len(shape) > 1 and shape[-1] % MOST_TENSOR_RANKS == 0
    block = math.gcd(shape[-1] // MOST_TENSOR_RANKS, BLOCK) if even else 0
    return block if block >= FEWEST else 0


def _read(state: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """This rank's part of a moment, in float32: a copy; zeros before the first step.

    Raises CheckpointError: what was resumed has the form of an earlier release.
    """
    if name not in state:
        return torch.zeros_like(like)
    held = local_part(state[name])
    if f"{name}_top" not in state:
        if held.dtype != torch.float32:
            raise CheckpointError(
                "the checkpoint's 8-bit moments have the form of an earlier release: resume with that release, or "
                "start a new run from the model, policy.model_path=RUN@N"
            )
        return held.clone()
    top = local_part(state[f"{name}_top"])
    codes = held.unflatten(-1, (top.shape[-1], -1)).float()
    return _size(codes.abs(), name).mul_(top.unsqueeze(-1).float().exp2_()).mul_(codes.sign()).flatten(-2)


def _size(code: Tensor, name: str) -> Tensor:
    """The share of its block's top power that a code stands for; 0 for none."""
    return code.sub(LEVELS[name]).div_(PER_OCTAVE).exp2_().masked_fill_(code == 0, 0.0)


def _write(state: dict[str, Any], name: str, moment: Tensor, parameter: Tensor) -> None:
    """Keep a moment."""
    if not (block := block_of(parameter.shape)):
        state[name] = placed_as(parameter, moment.clone())
        return
    numbers, levels = moment.unflatten(-1, (-1, block)), LEVELS[name]
    size = numbers.abs()
    # A power of two, so that the powers of all steps are the same; the largest may be rounded up by one code.
    largest = size.amax(-1).clamp_(min=torch.finfo(torch.float32).tiny).log2_()
    top = largest.add_(1 / PER_OCTAVE).ceil_().clamp_(-126, 127)
    size.mul_(top.neg().exp2_().unsqueeze(-1))
    code = size.log2().mul_(PER_OCTAVE).add_(levels).floor_().clamp_(min=0)
    low = _size(code, name)
    share = size.sub(low).div_(_size(code + 1, name).sub_(low))
    code.add_(share > _thresholds(parameter, block, state["step"], name)).clamp_(max=levels)
    if name == "exp_avg":
        code.mul_(numbers.sign())
    else:  # what is not 0 does not become 0: it is divided by
        code = torch.where(size > 0, code.clamp_(min=1), 0.0)
    kept = torch.int8 if name == "exp_avg" else torch.uint8
    state[name] = placed_as(parameter, code.to(kept).flatten(-2))
    state[f"{name}_top"] = placed_as(parameter, top.to(torch.int8))


def _thresholds(parameter: Tensor, block: int, step: Tensor, name: str) -> Tensor:
    """Numbers in [0, 1) for this rank's part, even over the steps of one moment and over the moments of one step.

    They are a function of step and place in the whole tensor (an additive recurrence with irrational steps), not of a
    random generator, whose state other things depend on: a step that is done again gives the same bits.
    """
    box, device = local_box(parameter), parameter.device
    within = torch.arange(block, device=device, dtype=torch.float64).mul_(_WITHIN).frac_().float()
    place, stride = step.double() * _STEP + (0.5 if name == "exp_avg" else 0.0), parameter.shape[-1] // block
    number = torch.arange(box.shape[-1] // block, device=device, dtype=torch.float64) + box.offset[-1] // block
    for dim in reversed(range(parameter.dim() - 1)):  # the block's number in the whole tensor, row by row
        rows = torch.arange(box.shape[dim], device=device, dtype=torch.float64).add_(box.offset[dim]).mul_(stride)
        number = rows.view(-1, *[1] * number.dim()) + number
        stride *= parameter.shape[dim]
    return number.mul_(_ACROSS).add_(place).frac_().float().unsqueeze(-1).add(within).frac_()


class CombinedOptimizer(Optimizer):
    """Several optimizers over disjoint parameters, stepped as one; groups and state are shared with the members."""

    def __init__(self, members: Iterable[Optimizer]) -> None:
        self.members = list(members)
        super().__init__([group for member in self.members for group in member.param_groups], {})
        for member in self.members:
            member.state = self.state

    def step(self, closure: Any = None) -> None:
        for member in self.members:
            member.step(closure)


_NUMBERS_AT_ONCE = 1 << 26  # of parameters whose moments are on the device together


class OffloadedOptimizer(CombinedOptimizer):
    """Steps `members`, optimizers over disjoint parameters, with their moments in host memory between the steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for member in self.members:
            groups = member.param_groups
            try:
                for group in groups:
                    for few in _parts(group["params"]):
                        member.param_groups = [{**group, "params": few}]
                        self._step(member, few)
            finally:
                member.param_groups = groups

    def park(self, parameter: Tensor) -> None:
        """Move this parameter's moments, as a checkpoint gave them, to the host."""
        state = self.state[parameter]
        state.update({name: _on_host(value) if _is_moment(value) else value for name, value in state.items()})

    def _step(self, member: Optimizer, parameters: list[Tensor]) -> None:
        parked = {}
        for parameter in parameters:
            state = self.state.get(parameter, {})
            parked[parameter] = {name: value for name, value in state.items() if _is_moment(value)}
            state.update({name: _like(value, parameter.device) for name, value in parked[parameter].items()})
        member.step()
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for name in [name for name, value in state.items() if _is_moment(value)]:
                home = parked[parameter].get(name)
                if home is None:
                    home = _on_host(state[name])
                else:
                    local_part(home).copy_(local_part(state[name]), non_blocking=True)
                state[name] = home
        if parameters[0].is_cuda:  # a checkpoint may read the host's memory at once
            torch.cuda.current_stream().synchronize()


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _on_host(value: Tensor) -> Tensor:
    """A copy in host memory, which a GPU reads without a copy in between."""
    return _like(value, torch.device("cpu"), pin_memory=local_part(value).is_cuda)


def _like(value: Tensor, device: torch.device, *, pin_memory: bool = False) -> Tensor:
    local = local_part(value)
    copy = torch.empty(local.shape, dtype=local.dtype, device=device, pin_memory=pin_memory)
    copy.copy_(local, non_blocking=True)
    # `from_local` would move it to the device of the mesh
    return DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy


def _parts(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """So many in a row as are stepped together."""
    few: list[Tensor] = []
    for parameter in parameters:
        few.append(parameter)
        if sum(local_part(one.detach()).numel() for one in few) >= _NUMBERS_AT_ONCE:
            yield few
            few = []
    if few:
        yield few
