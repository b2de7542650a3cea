"""The optimizer step that all ranks take or skip: global norm, clip, step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from learner.model.optimizer import Schedule
from learner.ranks.mesh import Ranks, local_part


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step."""

    grad_norm: float  # global norm before clipping; nan or inf if the step was skipped
    skipped: bool  # on all ranks if any gradient was not finite; weights and moments are untouched then
    lr: float
    cosine: float | None = None  # to the gradient of the step before, if that was kept
    left_out: bool = False  # not taken, because the policy had moved far enough: norm and rate are of the step before


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The results of a batch's optimizer steps."""

    steps: tuple[StepResult, ...]

    @property
    def skipped(self) -> bool:
        """No step changed anything, because no gradients were finite."""
        return all(step.skipped for step in self.steps)

    @property
    def num_skipped(self) -> int:
        """Steps that changed nothing."""
        return sum(step.skipped for step in self.steps)

    @property
    def grad_norm(self) -> float:
        """Mean global norm of the steps whose gradients were finite; not finite if there is none."""
        norms = [step.grad_norm for step in self.steps if not (step.skipped or step.left_out)]
        return math.fsum(norms) / len(norms) if norms else self.steps[0].grad_norm

    @property
    def cosine(self) -> float | None:
        """Mean cosine of a step's gradient to that of the step before; None where none was measured."""
        found = [step.cosine for step in self.steps if step.cosine is not None]
        return math.fsum(found) / len(found) if found else None

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.steps[-1].lr


class GradientCosine:
    """Compares each step's gradient with that of the step before, of which it keeps a copy: 4 bytes a parameter that is
    trained in float32, on each rank those of its shards."""

    def __init__(self) -> None:
        self._before: dict[Tensor, Tensor] = {}
        self._norm = 0.0

    def measure(self, module: nn.Module, norm: float, ranks: Ranks) -> float | None:
        """The cosine, None in the first step; a collective call. `norm` is of all gradients, and finite."""
        gradients = {one: one.grad for one in module.parameters() if one.grad is not None}  # none: of an unused expert
        found = None
        if norm and self._norm:
            products = [
                float((local_part(gradient) * self._before[one]).sum(dtype=torch.float64))
                for one, gradient in gradients.items() if one in self._before and ranks.owns(gradient)
            ]
            found = ranks.add(sum(products)) / (norm * self._norm)
        self._before, self._norm = {one: local_part(grad).clone() for one, grad in gradients.items()}, norm
        return found


@torch.no_grad()
def optimizer_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, *, step: int, max_grad_norm: float,
    ranks: Ranks, lr_scale: float = 1.0, frozen: bool = False, cosine: GradientCosine | None = None,
) -> StepResult:
    """Clip the global gradient norm, step, and forget the gradients.

    Args:
        step: the optimizer step's number, counted from 0; the scheduled rate depends on nothing else.
        lr_scale: factor on the scheduled rate, for steps that trust their batch less.
        max_grad_norm: gradients are scaled down to this norm; 0 or less does not clip.
        cosine: measures the gradient against that of the step before.
        frozen: measure and forget the gradients, but change nothing (a critic's warm-up).
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    _agree(gradients, ranks)
    norm = grad_norm(gradients, ranks)
    lr = schedule.lr_at(step) * lr_scale
    skipped = not math.isfinite(norm)
    turned = cosine.measure(module, norm, ranks) if cosine is not None and not skipped else None
    if not skipped and not frozen:
        if 0 < max_grad_norm < norm:
            torch._foreach_mul_([local_part(g) for g in gradients], max_grad_norm / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(norm, skipped, 0.0 if frozen else lr, turned)


def _agree(gradients: list[Tensor], ranks: Ranks) -> None:
    """Give parameters that every rank of the tensor axis computes whole the gradient of one rank.

    Kernels that add up in no fixed order would let the copies of a weight drift apart.
    """
    if ranks.mesh.tensor == 1 or ranks.device_mesh is None:
        return
    group = ranks.device_mesh.get_group("tensor")
    for gradient in gradients:
        if not isinstance(gradient, DTensor) or "tensor" not in (gradient.device_mesh.mesh_dim_names or ()):
            dist.broadcast(local_part(gradient), group=group, group_src=0)


def reduce_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next backward pass adds the gradients of all ranks up, or each rank keeps its own, whole, in float32.

    The pass that does so last must: it adds up what was kept before, too.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)


def can_restart(module: nn.Module) -> bool:
    """Whether passes go on after one that an exception ended; FSDP2 of torch before 2.13 cannot."""
    return not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")


def forget_passes(module: nn.Module) -> None:
    """Forget all gradients, and those of a pass that an exception ended."""
    module.zero_grad(set_to_none=True)  # where FSDP2 has gathered weights, of the gathered ones
    if isinstance(module, FSDPModule):
        module.reset_iter_state()
        module.zero_grad(set_to_none=True)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the free blocks are cut for passes of another size


def grad_norm(gradients: list[Tensor], ranks: Ranks) -> float:
    """Euclidean norm over all gradients, each part counted once; a collective call.

    Norms are taken in the gradients' own precision and added up over them in float64.
    """
    owned = [local_part(gradient) for gradient in gradients if ranks.owns(gradient)]
    parts = [part for part in owned if part.numel()]
    return math.sqrt(ranks.add(
        float(torch.stack(torch._foreach_norm(parts)).double().square().sum()) if parts else 0.0
    ))
