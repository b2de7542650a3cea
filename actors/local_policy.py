"""A model and its engine in this process, without a learner: for `streamrl eval` and `streamrl chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from actors.engines.base import Engine
from actors.engines.registry import build_engine
from actors.render import Renderer, load_tokenizer
from actors.runtime import engine_spec, make_renderer
from streamrl.config.load import load_config
from streamrl.config.schema import Config, SamplingConfig
from streamrl.environment import Task
from streamrl.errors import ConfigError
from streamrl.messages import Sampling, VersionRef

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(slots=True)
class LocalPolicy:
    """An engine that serves one model, and what turns messages into its tokens."""

    engine: Engine
    renderer: Renderer


def find_model(source: str) -> Path:
    """The checkpoint that a MODEL_OR_RUN names: a folder with config.json and weights, or a run's exported model.

    Raises ConfigError: neither, with what was found there instead.
    """
    folder = Path(source)
    model = folder / "model" if (folder / "config.yaml").exists() else folder
    if not folder.is_dir():
        raise ConfigError(f"{source}: there is no such folder. Give a run, as runs/NAME, or a Hugging Face checkpoint.")
    if not (model / "config.json").exists():
        if model != folder:
            raise ConfigError(
                f"{source} has no exported model: it is written at the end (checkpoint.export_hf=true). Let the "
                f"run finish, or resume it: streamrl launch {folder / 'config.yaml'} run.dir={source} "
                "checkpoint.resume=true"
            )
        raise ConfigError(f"{source} holds no config.json: give a run, as runs/NAME, or a Hugging Face checkpoint.")
    if not any((model / name).exists() for name in WEIGHTS):
        raise ConfigError(f"{model} holds no weights: give a checkpoint with one of {', '.join(WEIGHTS)}.")
    return model


def local_config(source: str, words: Sequence[str]) -> Config:
    """The settings of the run, if `source` is one, with `words` on top, and its model."""
    model, file = find_model(source), Path(source) / "config.yaml"
    own = [str(file)] if file.exists() else []
    return load_config([*own, *words, f"policy.model_path={model}", "policy.tiny.enabled=false"])


async def open_policy(config: Config, task: Task | None = None) -> LocalPolicy:
    """Build the engine and give it the weights of policy.model_path; may take a minute."""
    model_dir = Path(config.policy.model_path or "")
    disable_progress_bar()
    tokenizer = load_tokenizer(model_dir)
    spec = engine_spec(config, model_dir, tokenizer)
    engine = build_engine(config.actors.engine, spec)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=spec.dtype, local_files_only=True, trust_remote_code=False
    )
    tensors: dict[str, torch.Tensor] = {name: tensor.detach() for name, tensor in model.named_parameters()}
    await engine.install(tensors, VersionRef(1, 0))
    return LocalPolicy(engine, make_renderer(config, tokenizer, task))


def sampling_message(sampling: SamplingConfig) -> Sampling:
    """What an engine draws from."""
    return Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
