"""Build a running actor from the learner's WELCOME: model files, tokenizer, task, engine, installer.

An actor needs only the address. Model configuration and tokenizer come through the weight socket, the weights by the
weight transports, task and sampling from the learner's settings; local `key=value` words win over them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from actors.engines.base import Engine, build_engine
from actors.env_calls.inline import InlineCalls
from actors.env_calls.instances import Instances
from actors.episode import EpisodeRunner
from actors.load import LoadMeter
from actors.render import Renderer, load_end_ids, load_tokenizer
from actors.settings import (
    adapter_spec,
    engine_spec,
    episode_rules,
    local_settings,
    make_endpoint,
    make_renderer,
    max_leases,
    pick_device,
    settings_here,
)
from actors.weights.device import DeviceWeights
from actors.weights.installer import Installer
from envs.registry import task_of
from envs.sandbox.pool import LEVELS_IN_USE
from streamrl.config.eval_sets import EvalSet, eval_sets
from streamrl.config.load import to_plain
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import ActorsConfig
from streamrl.environment import HasSetUp, Task
from streamrl.errors import ConfigError
from streamrl.messages import (
    ANSWERED_STEPS,
    HUNG_CALLS,
    SANDBOX_LEVEL,
    SLOW_CALL_S,
    SLOW_CALLS,
    SLOWEST_CALL_S,
    Lease,
    Purpose,
    Welcome,
)
from streamrl.named_code import check_allowed, refuse_references
from streamrl.transport.keys import ActorKey
from streamrl.weights.assets import unpack_assets
from streamrl.weights.pull.host_cache import HostShare
from streamrl.weights.transport import WeightSource, device_transports

log = logging.getLogger("streamrl.actor")

FETCH_DEADLINE_S = 600.0
"""For one document over all offers: a slow tunnel may need minutes; a newer version supersedes a slow fetch anyway."""
BUILD_DEADLINE_S = 300.0
"""How long an actor that is stopping waits for an engine that is still being built, to close it."""
CLOSE_DEADLINE_S = 30.0
"""For closing engine, environments and transports; whatever hangs ends with the process."""
MAX_LEASE_FACTOR = 3
"""Most groups that are held at once, in units of those that fill the engine; needed where lengths differ much."""


@dataclass(slots=True)
class ActorRuntime:
    """The parts that are built from the first WELCOME and live as long as the process."""

    engine: Engine
    installer: Installer
    train: EpisodeRunner
    test: EpisodeRunner
    set_welcome: Callable[[Welcome], None]
    max_leases: int  # groups held at once while they fill the engine
    device_weights: DeviceWeights | None = None
    fits: Callable[[Welcome], bool] = lambda welcome: True  # whether it is what this WELCOME asks for
    load: LoadMeter = field(default_factory=LoadMeter)  # of all runners
    group_size: int | None = None  # members of a whole group; None: never more than max_leases
    sets: Mapping[str, EpisodeRunner] = field(default_factory=dict)  # of `eval.datasets`
    device: str = "cpu"

    @property
    def runners(self) -> tuple[EpisodeRunner, ...]:
        return (self.train, self.test, *self.sets.values())

    def runner_of(self, lease: Lease) -> EpisodeRunner:
        """The runner of this lease's episodes; KeyError for an evaluation set that the settings do not have."""
        if lease.purpose != Purpose.EVAL:
            return self.train
        return self.sets[lease.dataset] if lease.dataset else self.test

    def num_free_leases(self, num_train: int) -> int:
        """Groups that could be begun in addition: up to max_leases, and more while places of the engine are empty.

        A group ends with its longest answer and its slowest reward; if only whole groups made room, the places of its
        other members would stay empty until then.
        """
        if self.group_size is None:
            return max(0, self.max_leases - num_train)
        empty = self.engine.max_num_seqs - self.load.num_for_engine
        more = min(empty // self.group_size, MAX_LEASE_FACTOR * self.max_leases - num_train)
        return max(0, self.max_leases - num_train, more)

    async def close(self) -> None:
        self.installer.close()
        if self.device_weights is not None:
            await asyncio.to_thread(self.device_weights.close)
        for runner in self.runners:
            await runner.close()
        for task in {id(runner.task): runner.task for runner in self.runners}.values():
            if isinstance(task, HasSetUp):
                task.tear_down()
        await self.engine.close()


class RuntimeHandle:
    """A runtime, from the thread that builds it until it is closed; `runtime` is None until it is built.

    `has_processes`: whether the engine starts processes, which would be left behind if it were not waited for.
    """

    def __init__(
        self, build: Callable[[Welcome], ActorRuntime], has_processes: Callable[[Welcome], bool] = lambda _: True
    ) -> None:
        self.runtime: ActorRuntime | None = None
        self._build, self._has_processes = build, has_processes
        self._patience_s = BUILD_DEADLINE_S
        self._building: asyncio.Future[ActorRuntime] | None = None

    def begin(self, welcome: Welcome) -> bool:
        """Build in a thread, which may take minutes; False if that was begun before."""
        if self._building is not None:
            return False
        self._patience_s = BUILD_DEADLINE_S if self._has_processes(welcome) else 0.0
        self._building = asyncio.get_running_loop().run_in_executor(None, self._build, welcome)
        return True

    async def if_begun(self) -> ActorRuntime | None:
        """The runtime, whose building is waited for; None if it was not begun."""
        return None if self._building is None else await self.finished()

    async def finished(self) -> ActorRuntime:
        """The runtime, or whatever error building raised. Cancelling this does not stop the thread: see `close`."""
        assert self._building is not None
        self.runtime = await asyncio.shield(self._building)
        gc.freeze()  # the model and its libraries: every full collection while sequences run would scan them
        return self.runtime

    async def close(self) -> bool:
        """Close the runtime, also one that a thread is still building if it may hold processes that only it can end.

        False if something hangs: this process must then end, because re-executed it would leave them running.
        """
        if self._building is None:
            return True
        await asyncio.wait({self._building}, timeout=self._patience_s)
        if not self._building.done() and not self._patience_s:
            return True
        try:
            if not self._building.done():
                raise TimeoutError
            if self._building.exception() is None:
                await asyncio.wait_for(self._building.result().close(), CLOSE_DEADLINE_S)
        except TimeoutError:
            log.error("the engine does not close: it is left to the end of the process")
            return False
        return True


def has_processes(welcome: Welcome, overrides: Sequence[str]) -> bool:
    """Whether the engine of these settings may start processes; the native one starts none."""
    try:
        return settings_here(_run_settings(welcome), overrides).actors.engine != "native"
    except ConfigError:  # nothing is built then, which says why
        return False


def _run_settings(welcome: Welcome) -> dict[str, Any]:
    """The hub's settings. Raises ConfigError: they cannot be read."""
    try:
        told = json.loads(welcome.task)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the hub's settings cannot be read, take the release that it has: {error}") from error
    if not isinstance(told, dict):
        raise ConfigError("the hub's settings are no mapping of sections: take the release that it has")
    return told


def weight_source(
    actors: ActorsConfig, context: zmq.Context,
    make_device_weights: Callable[[Sequence[str], str, zmq.Context], DeviceWeights] = DeviceWeights,
    key: ActorKey | None = None,
) -> tuple[WeightSource, DeviceWeights | None]:
    """The transports that `actors.transports` allows; ConfigError for one that cannot work on this machine."""
    names = actors.transports
    source = WeightSource(context, transports=names, key=key)
    if not device_transports(names, setting="actors.transports"):
        return source, None
    device_weights = make_device_weights(names, pick_device(actors.device), context)
    source.factories |= device_weights.factories
    return source, device_weights


def build_runtime(
    welcome: Welcome, overrides: Sequence[str], source: WeightSource, device_weights: DeviceWeights | None = None,
    calls: InlineCalls | None = None,
) -> ActorRuntime:
    """Everything that the run's settings and this actor's own `key=value` words ask for; blocks for minutes."""
    def set_welcome(latest: Welcome) -> None:
        source.pull_token, source.limits = latest.pull_token, latest.limits

    set_welcome(welcome)
    told = _run_settings(welcome)
    refuse_references(told)
    config = settings_here(told, overrides)
    if config.actors.engine == "native" and told.get("actors", {}).get("engine") == "vllm":
        log.info("the engine of the run is vLLM, and this actor's is native")
    check_allowed(to_plain(config), to_plain(local_settings(overrides)))  # before anything is imported by its name
    source.relay = config.actors.relay
    source.share = HostShare(welcome.run_id) if config.actors.share_weights else None
    task = task_of(config)
    if isinstance(task, HasSetUp):
        task.set_up()
    with tempfile.TemporaryDirectory(prefix="streamrl-actor-") as model_dir:
        assets = source.fetch_assets(welcome.offers, welcome.assets_nbytes, welcome.assets_digest)
        unpack_assets(assets, model_dir)
        tokenizer = load_tokenizer(model_dir)
        end_ids = load_end_ids(model_dir, tokenizer)
        usable = device_transports({*config.actors.transports} & {*source.factories}, setting="actors.transports")
        spec = replace(
            engine_spec(config, Path(model_dir), tokenizer), adapter=adapter_spec(welcome),
            num_device_documents=2 * bool(usable), takes_turns=welcome.turn > 0,
        )
        engine = build_engine(config.actors.engine, spec)
    renderer = make_renderer(config, tokenizer, end_ids, task)
    load, inline, instances = LoadMeter(), calls or InlineCalls(), Instances(config.env.num_max_instances)
    endpoint = make_endpoint(config)
    runners = [
        EpisodeRunner(
            task, engine, renderer, episode_rules(config, sampling, task, trains=trains),
            num_threads=config.env.num_threads, load=load, inline=inline, endpoint=endpoint, instances=instances,
        )
        for sampling, trains in ((config.rollout.train.sampling, True), (eval_sampling(config), False))
    ]
    sets = {
        one.name: set_runner(one, engine, partial(make_renderer, one.config, tokenizer, end_ids), load, own=runners[1])
        for one in eval_sets(config) if one.name
    }
    installer = Installer(engine, source.fetch, fetch_deadline_s=FETCH_DEADLINE_S, on_close=source.close)
    return ActorRuntime(
        engine, installer, *runners, set_welcome=set_welcome,
        max_leases=max_leases(config.actors.num_concurrent, config.rollout.num_responses_per_prompt),
        device_weights=device_weights, fits=lambda later: built_from(later) == built_from(welcome), load=load,
        group_size=config.rollout.num_responses_per_prompt, sets=sets, device=spec.device,
    )


def set_runner(
    one: EvalSet, engine: Engine, renderer_of: Callable[[Task], Renderer], load: LoadMeter, *, own: EpisodeRunner
) -> EpisodeRunner:
    """Plays the episodes of an evaluation set; one of the run's own records has the task of `own`."""
    task, instances = own.task, own.instances
    if one.other_task:
        task, instances = task_of(one.config), Instances(one.config.env.num_max_instances)
        if isinstance(task, HasSetUp):
            task.set_up()
    rules = episode_rules(one.config, one.sampling, task, trains=False)
    return EpisodeRunner(
        task, engine, renderer_of(task), rules, num_threads=one.config.env.num_threads, load=load,
        endpoint=own.endpoint, instances=instances,
    )


def environment_calls(runtime: ActorRuntime) -> dict[str, float]:
    """Heartbeat numbers: environment calls that are slow or were given up, steps that were answered, sandbox level."""
    executors = [runner.executor for runner in runtime.runners]
    answered = [executor.num_answered for executor in executors]
    slow = [executor.slow(SLOW_CALL_S) for executor in executors]
    return {
        SLOW_CALLS: float(sum(count for count, _ in slow)), SLOWEST_CALL_S: max(longest for _, longest in slow),
        HUNG_CALLS: float(sum(executor.num_hung_calls for executor in executors)),
        ANSWERED_STEPS: float(sum(counts["step"] + counts["last_step"] + counts["rollout"] for counts in answered)),
        SANDBOX_LEVEL: float(min(LEVELS_IN_USE, default=0)),
    }


def built_from(welcome: Welcome) -> tuple[object, ...]:
    """The part of a WELCOME that a runtime depends on; a resumed run may come with other settings."""
    settings = json.loads(welcome.task)
    sections = {name: settings.get(name) for name in ("env", "data", "reward", "rollout", "actors")}
    sections["sets"] = settings.get("eval", {}).get("datasets")
    longest = settings.get("learner", {}).get("max_tokens_per_device")
    tensors = None if welcome.layout is None else welcome.layout.tensors
    return sections, longest, welcome.assets_digest, tensors, adapter_spec(welcome)


def default_actor_id(key: ActorKey | None = None) -> str:
    """Name of its key, or of its host, and a random part, in the protocol's alphabet."""
    if key is not None:
        return f"{key.name}-{os.urandom(4).hex()}"
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in os.uname().nodename.lower())[:40]
    return f"{host}-{os.urandom(4).hex()}"
