"""An estimate of what a learner rank needs of its GPU, from the checkpoint's headers and the settings alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from streamrl.config.schema import LearnerConfig, LoraBase, LoraConfig, PolicyConfig
from streamrl.errors import ConfigError

GIB = 1 << 30
STATE_BYTES = {"adamw": 16, "muon": 12, "sgd": 8, "adam8bit": 10}
"""Of each trained parameter, over all ranks: float32 master and gradient (4 + 4), and the moments."""
BASE_BYTES = {LoraBase.none: 2.0, LoraBase.int8: 1.0, LoraBase.nf4: 0.5 + (1 + 4 / 256) / 64}
"""Of each weight of a frozen linear layer. nf4 has a byte for 64 weights, and a float32 for 256 of those bytes."""
_LAYER_COPIES = 2  # the one that computes, and the next one, which is fetched meanwhile
_LOGIT_COPIES = 3
_KEPT_PER_TOKEN = 34  # bytes a hidden unit of a layer keeps for its backward pass in half precision, roughly


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the GPU of one rank. `states` and `gathered` are certain; the others depend on the batch."""

    states: int
    gathered: int
    activations: int
    logits: int

    @property
    def least(self) -> int:
        return self.states + self.gathered

    @property
    def total(self) -> int:
        return self.least + self.activations + self.logits

    def __str__(self) -> str:
        parts = ("states", "gathered", "activations", "logits")
        listed = ", ".join(f"{name} {getattr(self, name) / GIB:.1f}" for name in parts)
        return f"about {self.total / GIB:.1f} GiB on the GPU of a learner rank ({listed})"


def estimate_memory(
    policy: PolicyConfig, learner: LearnerConfig, model_dir: str | Path, *, num_ranks: int
) -> MemoryEstimate:
    """The memory that one of so many learner ranks needs, computing in half precision."""
    shapes = dict(tensor_shapes(model_dir))
    whole = sum(prod(shape) for shape in shapes.values())
    root = sum(prod(shape) for name, shape in shapes.items() if ".layers." not in name and ".h." not in name)
    settings: dict[str, Any] = json.loads((Path(model_dir) / "config.json").read_text())
    settings = settings.get("text_config", settings)
    layers, hidden = int(settings["num_hidden_layers"]), int(settings["hidden_size"])
    lora = policy.lora
    per_trained = STATE_BYTES.get(policy.optimizer.name, 8)
    kept = 2 if policy.gradient_checkpointing else _KEPT_PER_TOKEN
    shared, own, scratch = per_trained * whole, 0.0, 0  # of all ranks together, of each, while a layer computes
    if lora.rank is not None:
        linear = {name: shape for name, shape in shapes.items() if _is_linear(name, shape)}
        factors = lora.rank * sum(sum(shape) for name, shape in linear.items() if _is_adapted(name, lora))
        quantized = [prod(shape) for shape in linear.values()] if lora.base_quantization is not LoraBase.none else []
        own, scratch = BASE_BYTES[lora.base_quantization] * sum(quantized), 2 * max(quantized, default=0)
        whole -= sum(quantized)  # each rank has those as they are: they are neither shared nor gathered
        shared = 2 * whole + per_trained * factors
    return MemoryEstimate(
        states=int(own + shared / num_ranks),
        gathered=2 * (root + _LAYER_COPIES * (whole - root) // layers) + scratch,
        activations=learner.max_tokens_per_device * hidden * layers * kept,
        logits=_LOGIT_COPIES * 4 * learner.logprob_chunk_tokens * int(settings["vocab_size"]),
    )


def _is_linear(name: str, shape: list[int]) -> bool:
    """Whether this is a linear layer of the decoder; experts are one tensor of the model, however files name them."""
    return len(shape) == 2 and (".layers." in name or ".h." in name) and ".experts." not in name


def _is_adapted(name: str, lora: LoraConfig) -> bool:
    def named(ends: list[str]) -> bool:
        return any(f".{name.removesuffix('.weight')}".endswith(f".{end}") for end in ends)

    return (lora.target_modules == ["all-linear"] or named(lora.target_modules)) and not named(lora.exclude)


def tensor_shapes(model_dir: str | Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor, from the headers of a checkpoint's safetensors files."""
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"]


def check_memory(
    policy: PolicyConfig, learner: LearnerConfig, model_dir: str | Path, total_bytes: int, *, num_ranks: int
) -> MemoryEstimate:
    """Raise ConfigError if the model's states alone exceed the part of such a GPU that a rank may take."""
    found = estimate_memory(policy, learner, model_dir, num_ranks=num_ranks)
    limit = total_bytes * (learner.gpu_memory_share or 1.0)
    if found.least > limit:
        lora, smaller = policy.lora, "or train an adapter with policy.lora.rank=32"
        if lora.rank is not None:
            smaller = "or keep the frozen layers in 4 bits with policy.lora.base_quantization=nf4"
        if lora.base_quantization is LoraBase.nf4:
            smaller = "or take a smaller model"
        ranks = f"launch.num_learner_ranks={num_ranks} or "
        raise ConfigError(
            f"policy.model_path={policy.model_path} needs {found}, and a rank may take {limit / GIB:.1f} of "
            f"{total_bytes / GIB:.1f}: raise {ranks if lora.base_quantization is LoraBase.none else ''}"
            f"learner.gpu_memory_share, {smaller}"
        )
    return found
