"""Tensor parallelism: a model's own plan (`base_model_tp_plan` of transformers) by the styles of torch.

    colwise, rowwise                    rows or columns of a matrix; what is between them exists in part on each rank
    ..._gather_output, ..._split_input  the same around something that every rank computes whole
    replicated_with_grad_allreduce      a norm of heads: every rank has its weight, and a part of its gradient

Embeddings, the output layer and other norms are whole on every rank of the axis, as are hidden states between layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from learner.model.attention.packed import decoder_of
from streamrl.errors import ConfigError

_EMBEDDING = "embed_tokens"  # tied to the output layer in many models: it stays whole with it
_BY_ROWS = {"colwise": None, "colwise_gather_output": Replicate()}  # the layout of the output, None: in parts
_BY_COLUMNS = {"rowwise": None, "rowwise_split_input": Replicate()}  # the layout of the input
_OF_HEADS = "replicated_with_grad_allreduce"


def split_model(model: Any, mesh: DeviceMesh) -> None:
    """Give each rank of the tensor axis its part of the matrices; before FSDP2 shards them.

    Every rank holds the whole weights, or none yet. Raises ConfigError: a model that cannot be split over so many.
    """
    config, decoder = model.config.get_text_config(), decoder_of(model)
    plan = getattr(config, "base_model_tp_plan", None)
    family = f"learner.mesh.tensor={mesh.size()}: a model of type {config.model_type}"
    if not plan:
        raise ConfigError(f"{family} has no plan (base_model_tp_plan) in transformers: use learner.mesh.shard.")
    plan = {name: style for name, style in plan.items() if name != _EMBEDDING}
    if strange := sorted(set(plan.values()) - {*_BY_ROWS, *_BY_COLUMNS, _OF_HEADS}):
        raise ConfigError(f"{family} is split by {', '.join(strange)}, which is not known: use learner.mesh.shard.")
    used = set()
    for name, layer in list(decoder.named_modules()):
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if pattern in plan:
            used.add(pattern)
            for part, style in _styles(layer, plan[pattern]):
                _check_parts(family, name, part, style, decoder.get_submodule(name.rpartition(".")[0]), mesh.size())
                style._apply(part, mesh)
    if not used & {name for name, style in plan.items() if style in _BY_COLUMNS}:
        raise ConfigError(f"{family} has none of the layers that its plan names: use learner.mesh.shard.")


def _styles(layer: nn.Module, style: str) -> Iterator[tuple[nn.Module, ParallelStyle]]:
    """The styles of a layer, or of the parts of one with an adapter.

    One of an adapter's factors is split as the layer is, and the other one is whole: it is on the side that is whole.
    """
    if style == _OF_HEADS:
        yield layer, _OnParts()
        return
    adapted = hasattr(layer, "lora_A")
    parts = [layer.get_base_layer()] if adapted else [layer]
    if style in _BY_ROWS:
        made: ParallelStyle = ColwiseParallel(output_layouts=_BY_ROWS[style])
        parts += list(layer.lora_B.values()) if adapted else []
    else:
        made = RowwiseParallel(input_layouts=_BY_COLUMNS[style])
        parts += list(layer.lora_A.values()) if adapted else []
    made.src_data_rank = None  # all ranks have the same weights: nothing is sent
    yield from ((part, made) for part in parts)


def _check_parts(family: str, name: str, part: nn.Module, style: ParallelStyle, owner: nn.Module, size: int) -> None:
    """Raise ConfigError unless the layer has equal parts for all, of whole heads in attention."""
    if isinstance(style, _OnParts):
        return
    if type(part) is not nn.Linear:
        raise ConfigError(
            f"{family} has a {type(part).__name__} at {name}, which cannot be split: leave "
            "policy.lora.base_quantization=none, or use learner.mesh.shard."
        )
    by_rows = isinstance(style, ColwiseParallel)
    width = part.out_features if by_rows else part.in_features
    parted = (style.output_layouts if by_rows else style.input_layouts) == (Shard(-1),)
    unit = getattr(owner, "head_dim", 1) if parted else 1
    if width % (size * unit):
        what = f"{width // unit} heads" if unit > 1 else f"{width} {'rows' if by_rows else 'columns'}"
        raise ConfigError(f"{family} has {what} at {name}, which {size} ranks cannot share evenly: use fewer.")


class _OnParts(ParallelStyle):
    """A module whose weights are whole on every rank, and whose input is a part that no other rank has."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in part.named_parameters(recurse=False):
                whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def prepare(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Tensor:
            return DTensor.from_local(inputs[0], mesh, [Shard(0)], run_check=False)

        def finish(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, partition, prepare, finish)
