"""Make an actor's parts from the settings of a run: its engine, its renderer, the limits of its episodes."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch

from actors.endpoint.endpoint import Endpoint
from actors.engines.base import AdapterSpec, EngineSpec
from actors.render import Renderer
from actors.trajectory.rules import EpisodeRules
from streamrl.architectures.positions import num_positions
from streamrl.config.addresses import key_of
from streamrl.config.devices import ON_HOST
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.load import from_plain
from streamrl.config.schema import ActorsConfig, Config, OnEnvError, OnInstall, PromptOverflow, SamplingConfig
from streamrl.config.schema_task import History
from streamrl.environment import Task
from streamrl.errors import ConfigError, StreamrlError, in_one_line
from streamrl.messages import Welcome
from streamrl.weights.adapter import adapted_layers, rank_of
from streamrl.weights.transport import device_transports, load_transport

log = logging.getLogger("streamrl.actor")

INSTALL_POLICY = {OnInstall.keep: "continue", OnInstall.recompute: "recompute", OnInstall.finish: "drain"}


def local_settings(overrides: Sequence[str]) -> Config:
    """Load this actor's own settings over the defaults. Raises ConfigError."""
    # Without a word of its own it takes the engine of the run's settings, whatever is installed here.
    own = {"engine": "native", "transports": [*ON_HOST]}
    below = {"policy": {"model_path": "of the run"}, "publish": {"transports": [*ON_HOST]}, "actors": own}
    config = from_plain(below, [word for word in overrides if word != "actors.transports=auto"])
    if not any(word.startswith("actors.transports=") for word in overrides if word != "actors.transports=auto"):
        config.actors.transports = usable_transports(pick_device(config.actors.device))
    return config


def usable_transports(device: str) -> list[str]:
    """The transports that a device can use, best first; which of them come is up to the hub."""
    found = []
    for name in ("ipc", "nccl") if device != "cpu" else ():
        try:
            load_transport(name, setting="actors.transports").require(device)
            found.append(name)
        except ConfigError as error:
            log.info("no weights by %s: %s", name, in_one_line(error))
    return [*found, *ON_HOST]


def settings_here(told: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The run's settings with an actor's own on top, and the native engine where vLLM is theirs and not installed.

    Raises ConfigError.
    """
    config = from_plain(told, list(overrides))
    is_own = any(word.startswith("actors.engine=") for word in overrides)
    if config.actors.engine == "vllm" and not is_own and importlib.util.find_spec("vllm") is None:
        config.actors.engine = "native"
        config.actors.num_concurrent = min(config.actors.num_concurrent, ActorsConfig().num_concurrent)
    return config


def make_renderer(config: Config, tokenizer: Any, end_ids: Collection[int], task: Task | None) -> Renderer:
    """Make the renderer of this task's conversations; without a task it has no system or tool prompt of its own."""
    system_prompt = config.data.system_prompt
    return Renderer(
        tokenizer, end_ids=end_ids, apply_chat_template=config.data.apply_chat_template,
        chat_template=config.data.chat_template,
        system_prompt=getattr(task, "system_prompt", None) if system_prompt == "auto" else system_prompt,
        tool_prompt=getattr(task, "tool_prompt", ""),
    )


def make_endpoint(config: Config) -> Endpoint:
    """Return where the run's agents reach this actor. Raises ConfigError for a key that is not there."""
    one = config.actors.endpoint
    return Endpoint(one.bind, one.advertise, key_of("actors.endpoint.admin_key_env", one.admin_key_env))


def engine_spec(config: Config, model_dir: Path, tokenizer: object) -> EngineSpec:
    """The arguments of the engine's factory, whichever engine the settings name."""
    device, actors = pick_device(config.actors.device), config.actors
    return EngineSpec(
        model_dir=model_dir, tokenizer=tokenizer, max_num_seqs=actors.num_concurrent,
        max_tokens=longest_sequence(config, num_positions(model_dir)),
        max_new_tokens=config.rollout.train.sampling.max_new_tokens, device=device,
        dtype=pick_dtype(actors.dtype, device), num_threads=actors.num_threads or None,
        install_policy=INSTALL_POLICY[actors.on_install], options=dict(actors.vllm),
        memory_share=actors.gpu_memory_share, weights=actors.weights,
        num_device_documents=2 * bool(device_transports(actors.transports, setting="actors.transports")),
    )


def adapter_spec(welcome: Welcome) -> AdapterSpec | None:
    """The layers, rank and scale of the run's adapters; None where versions are whole models."""
    base, layout = welcome.base, welcome.layout
    if base is None or layout is None:
        return None
    return AdapterSpec(tuple(adapted_layers(spec.name for spec in layout.tensors)), rank_of(layout), base.scale)


def pick_device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str, device: str) -> torch.dtype:
    """float32 on a CPU, where bfloat16 is emulated and very slow; bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StreamrlError(f"actors.dtype={name} is no torch dtype: use auto, float32 or bfloat16")
    return dtype


def episode_rules(
    config: Config, sampling: SamplingConfig, task: Task | None = None, *, trains: bool = True
) -> EpisodeRules:
    """The limits of an episode; a trajectory may have what the learner can train on, or more if its answers may.

    A task may know where its answers end (`stop`, as rewards of tagged answers do), and that they end nowhere else
    (`ignore_eos`); what the sampling says wins. Turns with tools or of an agent end where the model ends them.
    """
    only_tags = not sampling.stop and getattr(task, "ignore_eos", False)
    by_turns = config.rollout.max_prompt_tokens + config.env.max_turns * sampling.max_new_tokens
    return EpisodeRules(
        max_prompt_tokens=config.rollout.max_prompt_tokens, max_new_tokens=sampling.max_new_tokens,
        max_turns=config.env.max_turns, max_tokens=max(config.learner.max_tokens_per_device, by_turns),
        stop=tuple(sampling.stop or getattr(task, "stop", ())),
        ignore_eos=only_tags if sampling.ignore_eos is None else sampling.ignore_eos,
        step_timeout_s=config.env.step_timeout_s,
        error_floor=config.env.reward_floor if config.env.on_error is OnEnvError.floor else None,
        truncate_prompts=config.data.prompt_overflow is PromptOverflow.truncate_left,
        append_history=config.env.history is History.append, wants_sets=trains,
    )


def max_leases(num_concurrent: int, group_size: int) -> int:
    """Groups that fill every sequence of the engine, and one more waiting for a free place."""
    return ceil(num_concurrent / group_size) + 1
