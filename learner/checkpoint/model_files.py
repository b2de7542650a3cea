"""A model's own files, from which each rank takes the rows of its shards: no rank holds the model, no CPU casts it.

    read_model     all of it, in host memory
    empty_model    the model without weights: parameters on the meta device, buffers computed
    materialize    room for this rank's shards, on its device
    ModelFiles     fills them from safetensors, row by row
    spread         fills them from a model that rank 0 holds, where the files name tensors differently from the model
                   (of most mixtures of experts: transformers fuses them while it loads)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from learner.checkpoint.shards import Box, local_box
from learner.ranks.mesh import Ranks, local_part
from streamrl.architectures.miniature import first_layers
from streamrl.architectures.saved_buffers import keep_buffers_wide, saved_tensors
from streamrl.errors import ConfigError, in_one_line
from streamrl.weights.model_folder import read_whole, stored_tensors, untied

_ROWS = 4096
"""Rows of two tensors that are compared at a time."""


def read_model(model_dir: Path, *, attention: str, needs_head: bool = True) -> Any:
    """The whole model in float32: see `streamrl.weights.model_folder.read_whole`. Raises ConfigError."""
    transformers_logging.disable_progress_bar()  # one bar per rank, over the log, for a load of a second
    _check_config(model_dir)
    return read_whole(model_dir, torch.float32, said=_said(model_dir), attention=attention, needs_head=needs_head)


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
        if (model_dir / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    keep_buffers_wide(model)
    return model


@contextmanager
def _as_config_errors(model_dir: Path) -> Iterator[None]:
    _check_config(model_dir)
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{_said(model_dir)} cannot be loaded for packed scoring: {in_one_line(error)}") from error


def _check_config(model_dir: Path) -> None:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{_said(model_dir)}: no config.json there; give a local Hugging Face checkpoint.")


def _said(model_dir: Path) -> str:
    return f"policy.model_path={model_dir}"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Register the parameters of new modules without memory; buffers keep their values."""
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
    """The safetensors files of a Hugging Face checkpoint, those that transformers reads. Raises ConfigError."""

    def __init__(self, model_dir: Path) -> None:
        self._folder = model_dir
        self._stored = stored_tensors(model_dir)
        self._open: dict[Path, Any] = {}
        self.nbytes_read = 0

    def hold(self, model: nn.Module) -> bool:
        """Whether every weight of the model is here under its own name, in its shape, and as a weight: no code."""
        wanted = dict(saved_tensors(model))
        return bool(self._stored) and all(
            name in self._stored and self._stored[name].shape == tuple(tensor.shape)
            and (self._stored[name].is_plain or not tensor.is_floating_point()) for name, tensor in wanted.items()
        )

    def check_tied(self, model: Any, *, said: str = "") -> None:
        """Raise ConfigError if the configuration ties two tensors of the model that differ in the files."""
        for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
            if one in self._stored and other in self._stored and not self._equal(one, other):
                raise ConfigError(untied(said or _said(self._folder), one, other))

    def _equal(self, one: str, other: str) -> bool:
        """Compare in pieces: both may be too large for the memory of a check."""
        if self._stored[one].shape != self._stored[other].shape:
            return False
        rows, (first, second) = self._stored[one].shape[0], (self._slice(one), self._slice(other))
        return all(
            torch.equal(first[at : at + _ROWS].float(), second[at : at + _ROWS].float())
            for at in range(0, rows, _ROWS)
        )

    def tensor(self, name: str) -> Tensor | None:
        """A whole tensor by its name in the files; None if there is none."""
        return self._file(name).get_tensor(name) if name in self._stored else None

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Read this rank's rows of every weight; cast on the device that they are on. Factors of adapters stay."""
        for name, tensor in saved_tensors(model):
            if ".lora_" in name:
                continue
            name = name.replace(".base_layer.", ".")
            box, local = local_box(tensor), local_part(tensor.detach())
            if not local.numel() or local.is_meta:  # of a layer that is not used
                continue
            if box.shape:
                rows = self._slice(name)[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))]
            else:
                rows = self._file(name).get_tensor(name)
            self.nbytes_read += rows.nbytes
            local.copy_(rows.to(local.device))

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        path = self._stored[name].file
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


@torch.no_grad()
def spread(whole: nn.Module | None, model: nn.Module, ranks: Ranks) -> None:
    """Fill the shards of every rank from the model that rank 0 holds, tensor by tensor; a collective call.

    Args:
        whole: of the same architecture, on rank 0 alone.
    """
    held = dict(saved_tensors(whole)) if whole is not None else {}
    for name, tensor in saved_tensors(model):
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
