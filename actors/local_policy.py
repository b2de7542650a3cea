"""A model and its engine in this process, without a learner: for `streamrl eval` and `streamrl chat`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from actors.engines.base import Engine, build_engine
from actors.engines.native.weights import checkpoint_tensors
from actors.render import Renderer, load_end_ids, load_tokenizer
from actors.settings import engine_spec, make_renderer
from streamrl.config.load import load_config, load_run_config
from streamrl.config.overrides import ALLOW, literal
from streamrl.config.schema import Config, SamplingConfig
from streamrl.environment import Task
from streamrl.errors import ConfigError, StreamrlError
from streamrl.messages import Sampling, VersionRef
from streamrl.stream.rebuilt import named_version, rebuilt, require_model
from streamrl.stream.segments import segments
from streamrl.weights.adapter import DOWN, UP, merged
from streamrl.weights.assets import unpack_assets
from streamrl.weights.model_folder import check_adapter, check_folder, check_vocabulary, num_rows, read_whole
from streamrl.weights.saved import SavedAdapter, read_version, saved_adapter, saved_versions, weights_digest


@dataclass(slots=True)
class LocalPolicy:
    """An engine that serves one model, its tokenizer and ends of turns, and what turns messages into its tokens."""

    engine: Engine
    tokenizer: Any
    end_ids: frozenset[int]
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The source of weights: a Hugging Face checkpoint, or with `version` a checkpoint of the run in `folder`."""

    folder: Path
    version: int | None = None

    @contextmanager
    def files(self) -> Iterator[Path]:
        """A folder with configuration and tokenizer."""
        if self.version is None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="streamrl-model-") as unpacked:
            unpack_assets((self.folder / "assets.msgpack").read_bytes(), unpacked)
            yield Path(unpacked)

    def tensors(self, files: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights by their names in the model; CheckpointError for a damaged checkpoint."""
        if self.version is None:
            return _weights_of(files, dtype)
        saved = dict(read_version(self.folder, self.version))
        if (adapter := saved_adapter(self.folder, self.version)) is not None:
            factors = {name: tensor for name, tensor in saved.items() if name.endswith((DOWN, UP))}
            saved = dict(merged(self._base(adapter), factors, adapter.scale))
        # Vectors stay as they are, the engine rounds what it holds narrower: a router's bias must not be.
        return {name: tensor.to(dtype) if tensor.dim() > 1 else tensor for name, tensor in saved.items()}

    def _base(self, adapter: SavedAdapter) -> dict[str, torch.Tensor]:
        """Read the base weights in float32: the sum is rounded once. Raises ConfigError if they are gone."""
        if adapter.quantized != "none":
            raise ConfigError(
                f"{self.folder}@{self.version} is an adapter over weights in {adapter.quantized}, which only a learner "
                f"reads: let the run finish and give {self.folder}, whose exported model is whole."
            )
        if not adapter.base.is_dir() or weights_digest(adapter.base) != adapter.base_digest:
            raise ConfigError(
                f"{self.folder}@{self.version} is an adapter of the weights in {adapter.base} (digest "
                f"{adapter.base_digest[:8]}), which are missing or have changed: put them back, or give a finished "
                "run without @, whose exported model is whole."
            )
        return _weights_of(adapter.base, torch.float32)


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Raises ConfigError where a library stumbles over a file of the model: any of them may raise anything."""
    try:
        yield
    except StreamrlError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise ConfigError(f"the model {source} cannot be loaded, restore its files or take another: {why}") from error


def _weights_of(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights of a Hugging Face checkpoint."""
    model = read_whole(folder, dtype, said=f"the model {folder}")
    return {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}


def run_of(source: str) -> Path | None:
    """The folder of the run that a MODEL_OR_RUN names, with a version or without; None if it is no run."""
    named = named_version(source)
    folder = Path(source) if named is None else named[0]
    return folder if (folder / "config.yaml").exists() else None


def find_model(source: str, allow: Sequence[str] = ()) -> LocalModel:
    """The weights that a MODEL_OR_RUN names: a folder with config.json and weights, a run's exported model, or RUN@N
    or RUN@best, for whose rebuilding the words `allow` hold.

    Raises ConfigError: neither, with what was found there instead.
    """
    if (named := named_version(source)) is not None:
        return _saved_model(*named, allow)
    require_model(source)
    folder, run = Path(source), run_of(source)
    model = folder / "model" if run is not None else folder
    check_adapter(model, said=str(model))
    if not (model / "config.json").exists():
        raise ConfigError(
            f"{source} has no exported model: it is written at the end (checkpoint.export_hf=true). Let the "
            f"run finish, or resume it: streamrl launch {folder / 'config.yaml'} run.dir={source} "
            f"checkpoint.resume=true{_saved(folder)}"
        )
    check_folder(model, said=str(model))
    return LocalModel(model)


def _saved_model(run: Path, version: int, allow: Sequence[str]) -> LocalModel:
    """Load from a checkpoint if there is one of that version, else rebuilt from the run's log."""
    if version not in saved_versions(run):
        if segments(run):
            return LocalModel(rebuilt(run, version, allow))
        raise ConfigError(
            f"{run} has no checkpoint of version {version}, and no log to rebuild it from: checkpoint.every_steps and "
            f"checkpoint.num_keep say which are kept{_saved(run)}"
        )
    if not (run / "assets.msgpack").exists():
        raise ConfigError(
            f"{run} holds no assets.msgpack, which has the model's configuration: take the whole run directory."
        )
    return LocalModel(run, version)


def _saved(run: Path) -> str:
    """The versions that are there, as the end of a message."""
    versions = saved_versions(run)
    return f". Saved versions: {', '.join(map(str, versions))}, as {run}@{versions[-1]}." if versions else "."


def local_config(source: str, words: Sequence[str]) -> Config:
    """The settings of the run, if `source` is one, with `words` on top, and its model."""
    allow = [word for word in words if word.startswith(ALLOW)]
    model, run = find_model(source, allow), run_of(source)
    path = model.folder if model.version is None else f"{model.folder}@{model.version}"
    words = [*words, f"policy.model_path={literal(str(path))}", "policy.tiny.enabled=false"]
    return load_config(words) if run is None else load_run_config(run, words)


async def open_policy(config: Config, task: Task | None = None) -> LocalPolicy:
    """Build the engine and give it the weights of policy.model_path; may take a minute."""
    model = find_model(config.policy.model_path or "")
    disable_progress_bar()
    with model.files() as files, _readable(config.policy.model_path or ""):
        tokenizer = load_tokenizer(files)
        rows = num_rows(json.loads((files / "config.json").read_text()))
        check_vocabulary(tokenizer, rows, said=f"the model {config.policy.model_path}")
        spec, end_ids = engine_spec(config, files, tokenizer), load_end_ids(files, tokenizer)
        engine = build_engine(config.actors.engine, spec)
        tensors = model.tensors(files, spec.dtype)
    await engine.install(tensors, VersionRef(1, model.version or 0))
    return LocalPolicy(engine, tokenizer, end_ids, make_renderer(config, tokenizer, end_ids, task))


def sampling_message(sampling: SamplingConfig) -> Sampling:
    """The sampling parameters as an engine takes them."""
    return Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
