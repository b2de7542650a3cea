"""An optimizer's moments in host memory: they visit the device a few parameters at a time, in the step.

It works with any optimizer whose step treats each parameter by itself and leaves its groups as they are. Between steps
`state` holds tensors of the host, placed as before, which a checkpoint reads and fills as any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from learner.model.moments.combined import CombinedOptimizer
from learner.ranks.mesh import local_part

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
        """Move what a checkpoint gave for this parameter to the host."""
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
