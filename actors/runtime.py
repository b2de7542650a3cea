"""From the learner's WELCOME to a running actor: model files, tokenizer, task, engine, installer.

An actor needs only the address. Model configuration and tokenizer come through the weight socket, the weights through
the weight plane, task and sampling from the learner's settings; local `key=value` words win over them.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path

import torch
import zmq

from actors.construction import ActorRuntime
from actors.engines.base import Engine
from actors.engines.native.engine import NativeEngine, build_model
from actors.engines.scripted import ScriptedEngine
from actors.engines.vllm.engine import VllmEngine
from actors.episode import EpisodeRules, EpisodeRunner
from actors.render import Renderer, load_tokenizer
from actors.weights.device import DEVICE_TRANSPORTS, DeviceWeights
from actors.weights.installer import Installer
from envs.registry import load_task
from streamrl.config.load import from_plain
from streamrl.config.schema import Config, OnEnvError, OnInstall, SamplingConfig
from streamrl.config.schema import Engine as EngineName
from streamrl.errors import StreamrlError
from streamrl.messages import Welcome
from streamrl.weights.assets import unpack_assets
from streamrl.weights.pull.host_cache import HostShare
from streamrl.weights.source import WeightSource

log = logging.getLogger("streamrl.actor")

FETCH_DEADLINE_S = 600.0
"""For one document over all offers: a slow tunnel may need minutes; a newer version supersedes a slow fetch anyway."""
INSTALL_POLICY = {OnInstall.keep: "continue", OnInstall.recompute: "recompute", OnInstall.finish: "drain"}


class RuntimeBuilder:
    """Called once, in a thread, with the first WELCOME.

    Args:
        overrides: this actor's own `key=value` words.
        local: what they mean before anything is known of the run (engine sizes, device, transports).
        make_device_weights: for the transports from GPU to GPU, if there are any.
    Raises:
        ConfigError: a transport that cannot work on this machine.
    """

    def __init__(
        self, overrides: Sequence[str], local: Config, context: zmq.Context, *,
        make_device_weights: Callable[[Sequence[str], str, zmq.Context], DeviceWeights] = DeviceWeights,
    ) -> None:
        self._overrides, self._local = list(overrides), local
        self._source = WeightSource(context)
        names = local.actors.transports
        self.device_weights: DeviceWeights | None = None
        if set(names) & set(DEVICE_TRANSPORTS):
            self.device_weights = make_device_weights(names, pick_device(local.actors.device), context)
            self._source.factories |= self.device_weights.factories
        self._source.factories = {
            name: factory for name, factory in self._source.factories.items() if name in names
        }

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self._source.factories)

    def __call__(self, welcome: Welcome) -> ActorRuntime:
        self._set_welcome(welcome)
        config = from_plain(json.loads(welcome.task), self._overrides)
        self._source.relay = config.actors.relay
        self._source.share = HostShare(welcome.run_id) if config.actors.share_weights else None
        task = load_task(config.env.name, path=config.env.path, options=dict(config.env.options))
        with tempfile.TemporaryDirectory(prefix="streamrl-actor-") as model_dir:
            self._fetch_assets(welcome, model_dir)
            tokenizer = load_tokenizer(model_dir)
            engine = self._engine(config, Path(model_dir), tokenizer)
        renderer = Renderer(
            tokenizer, apply_chat_template=config.data.apply_chat_template, system_prompt=config.data.system_prompt
        )
        runners = [
            EpisodeRunner(task, engine, renderer, episode_rules(config, sampling), num_threads=config.env.num_threads)
            for sampling in (config.rollout.train.sampling, config.rollout.test.sampling)
        ]
        installer = Installer(
            engine, self._source.fetch, fetch_deadline_s=FETCH_DEADLINE_S, on_close=self._source.close
        )
        return ActorRuntime(
            engine, installer, *runners, set_welcome=self._set_welcome,
            slots=lease_slots(config.actors.num_concurrent, config.rollout.num_responses_per_prompt),
            device_weights=self.device_weights, fits=lambda later: built_from(later) == built_from(welcome),
        )

    def _set_welcome(self, welcome: Welcome) -> None:
        self._source.pull_token, self._source.limits = welcome.pull_token, welcome.limits

    def _fetch_assets(self, welcome: Welcome, target: str) -> None:
        endpoint = next((offer.name for offer in welcome.offers if offer.transport == "zmq"), None)
        if endpoint is None:
            raise StreamrlError("the hub offers no zmq endpoint to fetch the model's configuration and tokenizer from")
        data = self._source.fetch_assets(endpoint, welcome.assets_nbytes, welcome.assets_digest)
        unpack_assets(data, target)

    def _engine(self, config: Config, model_dir: Path, tokenizer: object) -> Engine:
        device = pick_device(config.actors.device)
        sampling = (config.rollout.train.sampling, config.rollout.test.sampling)
        turns = config.env.max_turns
        max_tokens = config.rollout.max_prompt_tokens + turns * max(s.max_new_tokens for s in sampling)
        if turns > 1:
            max_tokens = max(max_tokens, config.learner.max_tokens_per_device)
        if config.actors.engine is EngineName.scripted:
            vocab_size = len(tokenizer)  # type: ignore[arg-type]
            return ScriptedEngine(
                slots=config.actors.num_concurrent, num_tokens=min(8, sampling[0].max_new_tokens), vocab_size=vocab_size
            )
        dtype = pick_dtype(config.actors.dtype, device)
        if config.actors.engine is EngineName.vllm:
            return VllmEngine(
                model_dir, tokenizer, slots=config.actors.num_concurrent, max_tokens=max_tokens, device=device,
                dtype=dtype, num_threads=config.actors.num_threads or None,
                install_policy=INSTALL_POLICY[config.actors.on_install], arguments=dict(config.actors.vllm),
            )
        return NativeEngine(
            build_model(model_dir, dtype=dtype, device=device), tokenizer, slots=config.actors.num_concurrent,
            max_tokens=max_tokens, device=device, num_threads=config.actors.num_threads or None,
            install_policy=INSTALL_POLICY[config.actors.on_install],
        )


def built_from(welcome: Welcome) -> tuple[object, ...]:
    """What of a WELCOME goes into a plant; a resumed run may come with other settings."""
    told = json.loads(welcome.task)
    sections = {name: told.get(name) for name in ("env", "data", "rollout", "actors")}
    longest = told.get("learner", {}).get("max_tokens_per_device")
    tensors = None if welcome.layout is None else welcome.layout.tensors
    return sections, longest, welcome.assets_digest, tensors


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


def episode_rules(config: Config, sampling: SamplingConfig) -> EpisodeRules:
    floor = config.env.reward_floor if config.env.on_error is OnEnvError.floor else None
    return EpisodeRules(
        max_prompt_tokens=config.rollout.max_prompt_tokens, max_new_tokens=sampling.max_new_tokens,
        max_turns=config.env.max_turns, max_tokens=trajectory_limit(config, sampling),
        stop=tuple(sampling.stop), ignore_eos=sampling.ignore_eos,
        step_timeout_s=config.env.step_timeout_s, error_floor=floor,
    )


def trajectory_limit(config: Config, sampling: SamplingConfig) -> int:
    """Tokens of a whole trajectory: what the learner can train on; evaluation may be longer if its answers may."""
    by_turns = config.rollout.max_prompt_tokens + config.env.max_turns * sampling.max_new_tokens
    return max(config.learner.max_tokens_per_device, by_turns)


def lease_slots(num_concurrent: int, group_size: int) -> int:
    """Groups held at once: enough to fill every sequence slot, and one more that waits to take a freed place."""
    return ceil(num_concurrent / group_size) + 1


def default_actor_id() -> str:
    """Host name and a random part, in the protocol's alphabet."""
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in os.uname().nodename.lower())[:40]
    return f"{host}-{os.urandom(4).hex()}"
