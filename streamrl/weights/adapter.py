"""A low-rank adapter as tensors: `W + scale * B A` for each linear layer that has one. Pure.

Two kinds of document travel in a run that trains an adapter. The *base* is the model's own weights; it never changes
and is fetched once. A version is the adapter alone: two small matrices a layer, by the names that peft gives them.

    base       model.layers.0.self_attn.q_proj.weight          [out, in]
    version    model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
               model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from streamrl.errors import WeightsError
from streamrl.messages import Layout, VersionRef

if TYPE_CHECKING:
    import torch

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
BASE_REF = VersionRef(0, 0)
"""The base's version: below that of every adapter, because the first learner of a run has epoch 1."""


class Factors(NamedTuple):
    """One layer's adapter: its output grows by `scale * up @ (down @ input)`."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank]


def factors_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Factors]:
    """Layer -> its factors. Raises WeightsError for a tensor that is no factor, or has no partner."""
    found = {}
    for layer in adapted_layers(tensors):
        down, up = tensors[layer + DOWN], tensors[layer + UP]
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
            raise WeightsError(f"the factors of {layer}, {list(down.shape)} and {list(up.shape)}, differ in rank")
        found[layer] = Factors(down, up)
    return found


def adapted_layers(names: Iterable[str]) -> list[str]:
    """The layers of an adapter's tensors, in order. Raises WeightsError as `factors_of`."""
    names = list(names)
    layers = [name.removesuffix(DOWN) for name in names if name.endswith(DOWN)]
    # A symmetric difference: tensors that are no factor, and factors whose partner is missing.
    strange = set(names) ^ {layer + end for layer in layers for end in (DOWN, UP)}
    if strange:
        raise WeightsError(f"an adapter is pairs of lora_A and lora_B, and of {sorted(strange)[0]} one is missing")
    return layers


def rank_of(layout: Layout) -> int:
    """The largest rank in an adapter's layout."""
    return max(spec.shape[0] for spec in layout.tensors if spec.name.endswith(DOWN))


def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the base with the adapter added, in the base's order and types; the sum is taken in float32.

    Raises WeightsError: the adapter has a layer that the base lacks, or of another shape.
    """
    factors = factors_of(adapter)
    if missing := sorted(layer for layer in factors if f"{layer}.weight" not in base):
        raise WeightsError(f"the base has no layer {missing[0]}: the adapter belongs to another model")
    for name, weight in base.items():
        pair = factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, weight if pair is None else _sum(name, weight, pair, scale)


def _sum(name: str, weight: torch.Tensor, pair: Factors, scale: float) -> torch.Tensor:
    if tuple(weight.shape) != (pair.up.shape[0], pair.down.shape[1]):
        raise WeightsError(
            f"{name} is {list(weight.shape)} and its adapter {[pair.up.shape[0], pair.down.shape[1]]}: another model"
        )
    # In float32, rounded once: in bfloat16 small updates of an adapter would be lost.
    whole = weight.float().addmm(pair.up.to(weight.device).float(), pair.down.to(weight.device).float(), alpha=scale)
    return whole.to(weight.dtype)
