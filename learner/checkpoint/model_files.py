"""A model's own files, from which each rank takes the rows of its shards: no rank holds the model, no CPU casts it.

    read_model     all of it, in host memory
    empty_model    the model without weights: parameters on the meta device, buffers computed
    materialize    room for this rank's shards, on its device
    ModelFiles     fills them from safetensors, row by row
    spread         fills them from a model that rank 0 holds, where the files name tensors differently from the model
                   (of most mixtures of experts: transformers fuses them while it loads)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from learner.checkpoint.shards import Box, local_box
from learner.ranks.mesh import Ranks, local_part
from streamrl.architectures.miniature import first_layers
from streamrl.architectures.saved_buffers import keep_buffers_wide, saved_buffers
from streamrl.errors import ConfigError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_model(model_dir: Path, *, attention: str) -> Any:
    """The whole model in float32, as transformers loads it; no code from the folder is run. Raises ConfigError."""
    transformers_logging.disable_progress_bar()  # one bar per rank, over the log, for a load of a second
    with _as_config_errors(model_dir):
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=attention, local_files_only=True,
            trust_remote_code=False,
        )


def read_first_layers(model_dir: Path, files: ModelFiles, config: Any, *, attention: str) -> Any:
    """The model cut down to as many of its layers as show every kind, in float32 in host memory."""
    short = first_layers(config) if config.get_text_config() is config else config
    model = empty_model(model_dir, dtype=torch.float32, attention=attention, config=short)
    materialize(model, torch.device("cpu")).tie_weights()  # each got memory of its own
    files.fill(model)
    return model


def empty_model(model_dir: Path, *, dtype: torch.dtype, attention: str, config: Any = None) -> Any:
    """The causal language model of a folder's configuration, or of `config`, with nothing in its parameters.

    Raises ConfigError.
    """
    with _as_config_errors(model_dir), _parameters_on_meta():
        if config is None:
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    keep_buffers_wide(model)
    if (model_dir / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return model


@contextmanager
def _as_config_errors(model_dir: Path) -> Iterator[None]:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"policy.model_path={model_dir}: no config.json there; give a local Hugging Face checkpoint.")
    try:
        yield
    except (ValueError, KeyError) as error:
        raise ConfigError(f"policy.model_path={model_dir} cannot be loaded for packed scoring: {error}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, parameters of new modules lose their memory as they are registered; buffers keep their values."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # one on meta may be tied: it stays this very object
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(module: Any, device: torch.device) -> Any:
    """Give meta tensors memory with arbitrary contents on this device, and move the others there."""
    return module._apply(
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )


def is_empty(module: nn.Module) -> bool:
    """Whether its weights are yet to be loaded."""
    return any(parameter.is_meta for parameter in module.parameters())


class ModelFiles:
    """The safetensors files of a Hugging Face checkpoint."""

    def __init__(self, model_dir: Path) -> None:
        self._folder = model_dir
        self._place: dict[str, str] = {}  # tensor -> file
        self._open: dict[str, Any] = {}
        self.nbytes_read = 0
        try:
            if (model_dir / _INDEX).is_file():
                self._place = dict(json.loads((model_dir / _INDEX).read_text())["weight_map"])
            elif (model_dir / _SINGLE).is_file():
                self._place = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        except (OSError, ValueError, KeyError, SafetensorError):
            self._place = {}  # transformers says what is wrong with them

    def hold(self, model: nn.Module) -> bool:
        """Whether every weight of the model is here under its own name, in its shape."""
        try:
            return bool(self._place) and all(
                name in self._place and tuple(self._slice(name).get_shape()) == tuple(tensor.shape)
                for name, tensor in _saved_tensors(model)
            )
        except (OSError, SafetensorError):
            return False

    def tensor(self, name: str) -> Tensor | None:
        """A whole tensor by its name in the files; None if there is none."""
        return self._file(self._place[name]).get_tensor(name) if name in self._place else None

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Read this rank's rows of every weight; cast on the device that they are on."""
        for name, tensor in _saved_tensors(model):
            box, local = local_box(tensor), local_part(tensor.detach())
            if not local.numel() or local.is_meta:  # of a layer that is not used
                continue
            if box.shape:
                rows = self._slice(name)[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))]
            else:
                rows = self._file(self._place[name]).get_tensor(name)
            self.nbytes_read += rows.nbytes
            local.copy_(rows.to(local.device))

    def _slice(self, name: str) -> Any:
        return self._file(self._place[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]


@torch.no_grad()
def spread(whole: nn.Module | None, model: nn.Module, ranks: Ranks) -> None:
    """Fill the shards of every rank from the model that rank 0 holds, tensor by tensor; a collective call.

    Args:
        whole: of the same architecture, on rank 0 alone.
    """
    held = dict(_saved_tensors(whole)) if whole is not None else {}
    for name, tensor in _saved_tensors(model):
        local = local_part(tensor.detach())
        if local.is_meta:
            continue
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
        if held:
            full.copy_(held[name])
        if ranks.mesh.world > 1:
            dist.broadcast(full, 0)
        box = local_box(tensor)
        local.copy_(full[box.within(Box((0,) * tensor.dim(), tuple(tensor.shape)))])


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, tensor): parameters, tied ones once, and the buffers that are saved."""
    yield from model.named_parameters()
    yield from saved_buffers(model)
