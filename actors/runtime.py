"""From the learner's WELCOME to a running actor: model files, tokenizer, task, engine, installer.

An actor needs only the address. Model configuration and tokenizer come through the weight socket, the weights by the
weight transports, task and sampling from the learner's settings; local `key=value` words win over them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch
import zmq

from actors.engines.base import Engine, EngineSpec
from actors.engines.registry import build_engine
from actors.episode import EpisodeRules, EpisodeRunner
from actors.load import LoadMeter
from actors.render import Renderer, load_tokenizer
from actors.weights.device import DeviceWeights
from actors.weights.installer import Installer
from envs.registry import task_of
from streamrl.config.load import from_plain
from streamrl.config.schema import Config, OnEnvError, OnInstall, PromptOverflow, SamplingConfig
from streamrl.environment import Task
from streamrl.errors import StreamrlError
from streamrl.messages import ANSWERED_STEPS, HUNG_CALLS, SLOW_CALL_S, SLOW_CALLS, SLOWEST_CALL_S, Welcome
from streamrl.weights.assets import unpack_assets
from streamrl.weights.pull.host_cache import HostShare
from streamrl.weights.source import WeightSource
from streamrl.weights.transport import device_transports

log = logging.getLogger("streamrl.actor")

FETCH_DEADLINE_S = 600.0
"""For one document over all offers: a slow tunnel may need minutes; a newer version supersedes a slow fetch anyway."""
BUILD_DEADLINE_S = 300.0
"""How long an actor that is stopping waits for an engine that is still being built, to close it."""
CLOSE_DEADLINE_S = 30.0
"""For closing engine, environments and transports; whatever hangs ends with the process."""
INSTALL_POLICY = {OnInstall.keep: "continue", OnInstall.recompute: "recompute", OnInstall.finish: "drain"}


@dataclass(slots=True)
class ActorRuntime:
    """What is built from the first WELCOME and lives as long as the process."""

    engine: Engine
    installer: Installer
    train: EpisodeRunner
    test: EpisodeRunner
    set_welcome: Callable[[Welcome], None]
    max_leases: int  # groups held at once
    device_weights: DeviceWeights | None = None
    fits: Callable[[Welcome], bool] = lambda welcome: True  # whether it is what this WELCOME asks for
    load: LoadMeter = field(default_factory=LoadMeter)  # of both runners

    async def close(self) -> None:
        self.installer.close()
        if self.device_weights is not None:
            await asyncio.to_thread(self.device_weights.close)
        self.train.executor.close()
        self.test.executor.close()
        await self.engine.close()


class RuntimeHandle:
    """One runtime, from the thread that builds it until it is closed; `runtime` is None until it is built."""

    def __init__(self, build: Callable[[Welcome], ActorRuntime]) -> None:
        self.runtime: ActorRuntime | None = None
        self._build = build
        self._building: asyncio.Future[ActorRuntime] | None = None

    def begin(self, welcome: Welcome) -> bool:
        """Build in a thread, which may take minutes; False if that was begun before."""
        if self._building is not None:
            return False
        self._building = asyncio.get_running_loop().run_in_executor(None, self._build, welcome)
        return True

    async def finished(self) -> ActorRuntime:
        """The runtime, or whatever error building raised. Cancelling this does not stop the thread: see `close`."""
        assert self._building is not None
        self.runtime = await asyncio.shield(self._building)
        return self.runtime

    async def close(self) -> bool:
        """Close the runtime, also one that a thread is still building: it may hold processes that only it can end.

        False if something hangs: this process must then end, because re-executed it would leave them running.
        """
        if self._building is None:
            return True
        await asyncio.wait({self._building}, timeout=BUILD_DEADLINE_S)
        try:
            if not self._building.done():
                raise TimeoutError
            if self._building.exception() is None:
                await asyncio.wait_for(self._building.result().close(), CLOSE_DEADLINE_S)
        except TimeoutError:
            log.error("the engine does not close: it is left to the end of the process")
            return False
        return True


def weight_source(
    local: Config, context: zmq.Context,
    make_device_weights: Callable[[Sequence[str], str, zmq.Context], DeviceWeights] = DeviceWeights,
) -> tuple[WeightSource, DeviceWeights | None]:
    """The transports that `actors.transports` allows; ConfigError for one that cannot work on this machine."""
    names = local.actors.transports
    source = WeightSource(context, transports=names)
    if not device_transports(names, setting="actors.transports"):
        return source, None
    device_weights = make_device_weights(names, pick_device(local.actors.device), context)
    source.factories |= device_weights.factories
    return source, device_weights


def build_runtime(
    welcome: Welcome, overrides: Sequence[str], source: WeightSource, device_weights: DeviceWeights | None = None
) -> ActorRuntime:
    """Everything that the run's settings and this actor's own `key=value` words ask for; blocks for minutes."""
    def set_welcome(latest: Welcome) -> None:
        source.pull_token, source.limits = latest.pull_token, latest.limits

    set_welcome(welcome)
    config = from_plain(json.loads(welcome.task), list(overrides))
    source.relay = config.actors.relay
    source.share = HostShare(welcome.run_id) if config.actors.share_weights else None
    task = task_of(config)
    with tempfile.TemporaryDirectory(prefix="streamrl-actor-") as model_dir:
        assets = source.fetch_assets(welcome.offers, welcome.assets_nbytes, welcome.assets_digest)
        unpack_assets(assets, model_dir)
        tokenizer = load_tokenizer(model_dir)
        engine = build_engine(config.actors.engine, engine_spec(config, Path(model_dir), tokenizer))
    renderer = make_renderer(config, tokenizer, task)
    load = LoadMeter()
    runners = [
        EpisodeRunner(
            task, engine, renderer, episode_rules(config, sampling, task), num_threads=config.env.num_threads,
            load=load,
        )
        for sampling in (config.rollout.train.sampling, config.rollout.test.sampling)
    ]
    installer = Installer(engine, source.fetch, fetch_deadline_s=FETCH_DEADLINE_S, on_close=source.close)
    return ActorRuntime(
        engine, installer, *runners, set_welcome=set_welcome,
        max_leases=max_leases(config.actors.num_concurrent, config.rollout.num_responses_per_prompt),
        device_weights=device_weights, fits=lambda later: built_from(later) == built_from(welcome), load=load,
    )


def make_renderer(config: Config, tokenizer: Any, task: Task | None) -> Renderer:
    """How conversations of this task become ids; without a task there are no prompts of its own."""
    system_prompt = config.data.system_prompt
    return Renderer(
        tokenizer, apply_chat_template=config.data.apply_chat_template, chat_template=config.data.chat_template,
        system_prompt=getattr(task, "system_prompt", None) if system_prompt == "auto" else system_prompt,
        tool_prompt=getattr(task, "tool_prompt", ""),
    )


def environment_calls(runtime: ActorRuntime) -> dict[str, float]:
    """For heartbeats: calls of environments that are slow or were given up, and how many steps were answered."""
    executors = [runner.executor for runner in (runtime.train, runtime.test)]
    answered = [executor.num_answered for executor in executors]
    slow = [executor.slow(SLOW_CALL_S) for executor in executors]
    return {
        SLOW_CALLS: float(sum(count for count, _ in slow)), SLOWEST_CALL_S: max(longest for _, longest in slow),
        HUNG_CALLS: float(sum(executor.num_hung_calls for executor in executors)),
        ANSWERED_STEPS: float(sum(counts["step"] + counts["last_step"] for counts in answered)),
    }


def engine_spec(config: Config, model_dir: Path, tokenizer: object) -> EngineSpec:
    """What the settings say of the engine, whichever it is."""
    device, actors = pick_device(config.actors.device), config.actors
    max_new_tokens = max(s.max_new_tokens for s in (config.rollout.train.sampling, config.rollout.test.sampling))
    max_tokens = config.rollout.max_prompt_tokens + config.env.max_turns * max_new_tokens
    if config.env.max_turns > 1:
        max_tokens = max(max_tokens, config.learner.max_tokens_per_device)
    return EngineSpec(
        model_dir=model_dir, tokenizer=tokenizer, max_num_seqs=actors.num_concurrent,
        max_tokens=max_tokens, max_new_tokens=config.rollout.train.sampling.max_new_tokens, device=device,
        dtype=pick_dtype(actors.dtype, device), num_threads=actors.num_threads or None,
        install_policy=INSTALL_POLICY[actors.on_install], options=dict(actors.vllm),
    )


def built_from(welcome: Welcome) -> tuple[object, ...]:
    """What of a WELCOME goes into a runtime; a resumed run may come with other settings."""
    settings = json.loads(welcome.task)
    sections = {name: settings.get(name) for name in ("env", "data", "reward", "rollout", "actors")}
    longest = settings.get("learner", {}).get("max_tokens_per_device")
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


def episode_rules(config: Config, sampling: SamplingConfig, task: Task | None = None) -> EpisodeRules:
    """The limits of an episode; a trajectory may have what the learner can train on, or more if its answers may.

    A task may know where its answers end (`stop`, as rewards of tagged answers do); `sampling.stop` wins over it.
    """
    by_turns = config.rollout.max_prompt_tokens + config.env.max_turns * sampling.max_new_tokens
    return EpisodeRules(
        max_prompt_tokens=config.rollout.max_prompt_tokens, max_new_tokens=sampling.max_new_tokens,
        max_turns=config.env.max_turns, max_tokens=max(config.learner.max_tokens_per_device, by_turns),
        stop=tuple(sampling.stop or getattr(task, "stop", ())), ignore_eos=sampling.ignore_eos,
        step_timeout_s=config.env.step_timeout_s,
        error_floor=config.env.reward_floor if config.env.on_error is OnEnvError.floor else None,
        truncate_prompts=config.data.prompt_overflow is PromptOverflow.truncate_left,
    )


def max_leases(num_concurrent: int, group_size: int) -> int:
    """Groups held at once: enough to fill every sequence of the engine, and one more waiting for a free place."""
    return ceil(num_concurrent / group_size) + 1


def default_actor_id() -> str:
    """Host name and a random part, in the protocol's alphabet."""
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in os.uname().nodename.lower())[:40]
    return f"{host}-{os.urandom(4).hex()}"
