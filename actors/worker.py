"""The actor's loop: leases in, groups out, new versions installed in between.

    hub thread (streamrl.transport.client) --events--> Worker (one asyncio loop) --tasks--> engine thread, env threads

    WELCOME    first time: build engine, renderer and task from the learner's settings; always: install its version
    LEASE      one task per group; a revoked one is cancelled
    ANNOUNCE   fetch and verify while sequences run, then swap between two forward passes
    HEARTBEAT  names the oldest useful version: groups that can no longer be trained are handed back (L3)
    STOP       the process ends with the exit code that the hub names
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import zmq

from actors import EXIT_CONFIG, EXIT_ENGINE_HUNG, EXIT_RESTART
from actors.activity import Activity
from actors.engines.base import engine_factory, wire_name
from actors.env_calls.inline import InlineCalls
from actors.leases import RunningLeases
from actors.load import UseMeter
from actors.rollout import returned, run_group, sendable
from actors.runtime import (
    ActorRuntime,
    RuntimeHandle,
    build_runtime,
    default_actor_id,
    environment_calls,
    has_processes,
    weight_source,
)
from actors.settings import local_settings, max_leases, pick_device
from actors.weights.turns import Turns, check_turns, release
from actors.weights.updater import WeightUpdater
from streamrl.errors import ConfigError, EngineError, StreamrlError
from streamrl.messages import (
    Announce,
    Drain,
    HubHeartbeat,
    Installed,
    Lease,
    LeaseRef,
    Leases,
    Limits,
    Manifest,
    Offer,
    Purpose,
    ReturnReason,
    Stop,
    Welcome,
)
from streamrl.transport.client import HubClient
from streamrl.transport.keys import read_actor_key
from streamrl.transport.session import ActorSession, Deliver, Disconnected, LinkClosed, Progress
from streamrl.version import __version__
from streamrl.weights.gpu.cuda_memory import device_id

log = logging.getLogger("streamrl.actor")

PROGRESS_S = 0.2
FAILED_DRAIN_S = 5.0
"""How long an actor that has failed may take to hand its leases back."""


def make_worker(endpoint: str, overrides: Sequence[str], calls: InlineCalls | None = None) -> Worker:
    """Make the worker of an actor of the hub at `endpoint`, in the running loop.

    Args:
        overrides: `key=value` words, which win over the learner's settings.
        calls: makes plain calls of the environment in this thread; None: those that have proved to be quick.
    Raises:
        ConfigError: an engine, a transport or a key that is not there; the hub was not asked.
    """
    local = local_settings(overrides)
    engine_factory(local.actors.engine)  # a wrong name is refused here, before the hub is asked
    key = read_actor_key(local.actors.key) if local.actors.key else None
    source, device_weights = weight_source(local.actors, zmq.Context(), key=key)
    # A first guess: group size and concurrency are the learner's, and heartbeats carry the real number.
    leases = max_leases(local.actors.num_concurrent, local.rollout.num_responses_per_prompt)
    session = ActorSession(
        local.actors.actor_id or default_actor_id(key), int.from_bytes(os.urandom(7), "little") + 1,
        engine=wire_name(local.actors.engine), max_leases=leases, transports=tuple(source.factories),
        software=f"streamrl {__version__}", random_seed=os.getpid(), give_up_after_s=local.actors.give_up_after_s,
        device=device_weights.device_id if device_weights is not None else device_id(pick_device(local.actors.device)),
    )
    client = HubClient(endpoint, session, key)
    if device_weights is not None:
        device_weights.report = client.report_nccl
    log.info("actor %s: connecting to %s", session.actor_id, endpoint)
    return Worker(
        client, lambda welcome: build_runtime(welcome, overrides, source, device_weights, calls),
        has_processes=lambda welcome: has_processes(welcome, overrides),
    )


class Worker:
    """Drives one engine for one hub; `build` makes the runtime from the first WELCOME, while heartbeats go on."""

    def __init__(
        self, client: HubClient, build: Callable[[Welcome], ActorRuntime], *,
        clock: Callable[[], float] = time.monotonic, has_processes: Callable[[Welcome], bool] = lambda _: True,
    ) -> None:
        self.client = client
        self._handle = RuntimeHandle(build, has_processes)
        self._leases = RunningLeases(client.send_group, clock)
        self._clock, self._activity, self._use = clock, Activity(clock()), UseMeter()
        self._stuck: tuple[LeaseRef, ...] = ()  # as of the last look at all, which is too slow for each lease
        self._updater: WeightUpdater | None = None
        self._welcome: Welcome | None = None
        self._newest: tuple[Manifest, tuple[Offer, ...]] | None = None
        self._limits = Limits()
        self._jobs: set[asyncio.Task[None]] = set()
        self._turns = Turns(self._give_memory_back, self._take_up, client.report_released, self._spawn)
        self._draining = self._leaving = self._install_waits = self._progress_due = False
        self._given_back = 0
        self._result: LinkClosed | None = None
        self._failure: LinkClosed | None = None

    @property
    def _runtime(self) -> ActorRuntime | None:
        return self._handle.runtime

    async def run(self) -> LinkClosed:
        """Work until the hub stops this actor, it leaves, or the engine is beyond repair."""
        self.client.start()
        self._spawn(self._report_progress())
        self._spawn(self._use.watch())
        try:
            while self._result is None:
                event = await self.client.events.get()
                if isinstance(event, LinkClosed):
                    self._result = self._failure or event
                else:
                    self._handle_event(event)
        finally:
            if not await self._close() and self._result is not None:
                detail = f"{self._result.detail}; what hangs here ends with the process only"
                self._result = LinkClosed(EXIT_ENGINE_HUNG, detail)
        return self._result

    def leave(self, reason: str) -> None:
        """SIGINT or SIGTERM: hand leases back, flush the outbox, end. A second call ends at once."""
        if self._leaving:
            self._end(130, "interrupted twice")
            return
        self._leaving = self._draining = True
        log.info("leaving (%s): %d leases are handed back", reason, len(self._leases.held))
        self._leases.hand_back(ReturnReason.DRAIN, reason)
        self.client.drain(reason)

    def launcher_gone(self) -> None:
        """Leave; at once while there is no engine, which can take minutes to build and holds nothing."""
        if self._runtime is None:
            os._exit(1)
        self.leave("the launcher exited")

    def _finish_and_leave(self, reason: str, deadline_s: float) -> None:
        """The hub asks: take no more leases, finish those that are held, then end; what is late is handed back."""
        if self._draining:
            return
        self._draining = True
        num = len(self._leases.held)
        log.info("leaving (%s): %d leases are finished first, within %.0f s", reason, num, deadline_s)
        self._update_progress()
        self.client.drain(reason, deadline_s)

    def _end(self, exit_code: int, detail: str) -> None:
        self.client.events.put_nowait(LinkClosed(exit_code, detail))

    def _fail(self, detail: str) -> None:
        """This process can do no more work: drain, then end so that it is restarted."""
        if self._failure is None:
            log.error("beyond repair: %s", detail)
            self._drain_and_end(EXIT_ENGINE_HUNG, detail, ReturnReason.ENGINE_ERROR, "beyond repair")

    def _drain_and_end(self, exit_code: int, detail: str, reason: ReturnReason, bye: str) -> None:
        """Hand leases back, flush the outbox, send BYE, end."""
        self._failure, self._draining = LinkClosed(exit_code, detail), True
        self._leases.hand_back(reason, detail)
        self._update_progress()
        self.client.drain(bye, FAILED_DRAIN_S)

    def _handle_event(self, deliver: Deliver) -> None:
        match deliver.event:
            case Welcome() as welcome:
                self._welcomed(welcome)
            case Leases() as leases:
                self._leased(leases)
            case Announce() as announce:
                self._newest = (announce.manifest, announce.offers)
                if self._should_install(announce):
                    self._spawn(self._install_newest())
            case HubHeartbeat() as heartbeat:
                self._leases.drop_useless(heartbeat.min_useful)
                self._turns.hear(heartbeat.turn)
            case Disconnected():
                log.warning("no message from the hub: reconnecting, %d leases go on", len(self._leases.held))
                self._turns.lost()
            case Drain() as drain:
                self._finish_and_leave(drain.reason, drain.deadline_s)
            case Stop() as stop:
                log.info("stopped by the hub: %s", stop.detail)

    # --- WELCOME and weights ------------------------------------------------------------------------------------

    def _welcomed(self, welcome: Welcome) -> None:
        log.info("joined run %s at %s, version %s", welcome.run_id, self.client.endpoint, welcome.version)
        self._welcome, self._limits = welcome, welcome.limits
        if welcome.manifest is not None:
            self._newest = (welcome.manifest, welcome.offers)
        for ref, keep in welcome.held:
            if not keep:
                self._leases.cancel(ref)
        was_asleep = not self._turns.actors
        self._turns.hear(welcome.turn, joined=True)
        if not was_asleep:
            self._take_up()

    def _take_up(self) -> None:
        """Do what the last WELCOME asks for, once it is the actors' turn."""
        welcome = self._welcome
        if welcome is None or not self._turns.actors:
            return
        if self._runtime is not None:
            if self._fits(self._runtime, welcome):
                self._runtime.set_welcome(welcome)
                self._spawn(self._install_newest())
        elif self._handle.begin(welcome):
            self._spawn(self._build(welcome))

    async def _give_memory_back(self) -> bool:
        """Hand leases back for the learner's turn: others get them."""
        self._leases.hand_back(ReturnReason.DRAIN, "it is the learner's turn")
        try:
            runtime = await self._handle.if_begun()
            if runtime is not None:
                given_back = await release(runtime.engine, runtime.installer, runtime.device)
                self._given_back = given_back if given_back is not None else self._given_back
        except EngineError as error:
            self._fail(str(error))
            return False
        except StreamrlError:
            return False  # `_build` says so, and ends the process
        self._update_progress()
        return True

    async def _build(self, welcome: Welcome) -> None:
        try:
            runtime = await self._handle.finished()
            if welcome.turn:
                check_turns(runtime.engine)
        except StreamrlError as error:
            log.error("cannot take part in run %s: %s", welcome.run_id, error)
            self._end(EXIT_CONFIG if isinstance(error, ConfigError) else 1, str(error))
            return
        assert self._welcome is not None  # the latest: the learner may have been resumed meanwhile
        if self._fits(runtime, self._welcome):
            runtime.set_welcome(self._welcome)
            await self._install_newest()

    def _fits(self, runtime: ActorRuntime, welcome: Welcome) -> bool:
        """False if the run's settings are no longer those of the runtime: the process then restarts itself."""
        if self._draining or runtime.fits(welcome):
            return True
        detail = "the run has other settings than this actor was built for"
        log.warning("%s: it hands back %d leases and joins again", detail, len(self._leases.held))
        self._drain_and_end(EXIT_RESTART, detail, ReturnReason.DRAIN, "other settings")
        return False

    def _should_install(self, announce: Announce) -> bool:
        """Pass the announcement to the GPU transports; False if it was for a broadcast of the version held here."""
        runtime, welcome = self._runtime, self._welcome
        if runtime is None or runtime.device_weights is None or welcome is None or welcome.layout is None:
            return True
        runtime.device_weights.hear(announce.manifest, announce.offers, welcome.layout)
        broadcast = any(offer.nccl is not None for offer in announce.offers)
        return not (broadcast and announce.manifest.ref == runtime.engine.installed)

    async def _install_newest(self) -> None:
        """The last announcement, not the caller's: older versions may be retired by the time the runtime is built."""
        if self._install_waits:
            return
        self._install_waits = True
        await self._turns.until_actors()
        await self._leases.pin.released()  # nothing is fetched meanwhile: what came first would be retired by then
        self._install_waits = False
        runtime, welcome, newest = self._runtime, self._welcome, self._newest
        if runtime is None or welcome is None or welcome.layout is None or newest is None:
            return
        if self._updater is None:
            self._updater = WeightUpdater(runtime.installer, report=self._report, broken=self._fail)
            runtime.installer.may_load = self._may_load
            self._spawn(self._updater.watch())
        await self._updater.install(*newest, welcome.layout, welcome.base)

    async def _may_load(self) -> None:
        await self._leases.pin.released()
        await self._turns.until_actors()

    def _report(self, report: Installed) -> None:
        if self._runtime is not None:
            self._runtime.load.paused(report.pause_s)
        self._update_progress()  # first: the heartbeat that follows the report says how many leases are free
        self.client.report_installed(report)

    # --- leases -------------------------------------------------------------------------------------------------

    def _leased(self, leases: Leases) -> None:
        for ref in leases.revoked:
            self._leases.cancel(ref)
        for lease in leases.grants:
            if lease.ref not in self._leases.held:
                self._start(lease)
        self._update_progress_soon()

    def _start(self, lease: Lease) -> None:
        runtime = self._runtime
        installed = runtime.engine.installed if runtime is not None and not self._draining else None
        if runtime is None or installed is None:
            self.client.send_group(returned(lease, ReturnReason.DRAIN, "not ready for leases"))
        elif installed < lease.min_version:
            detail = f"installed {installed} is older than the lease's {lease.min_version}"
            self.client.send_group(returned(lease, ReturnReason.STALE, detail))
        elif lease.keep_s > 0 and installed != lease.min_version:
            detail = f"installed {installed} is not the lease's {lease.min_version}"
            self.client.send_group(returned(lease, ReturnReason.DRAIN, detail))
        elif lease.purpose == Purpose.EVAL and lease.dataset and lease.dataset not in runtime.sets:
            detail = f"this actor knows no evaluation set {lease.dataset}"
            self.client.send_group(returned(lease, ReturnReason.ENV_ERROR, detail))
        else:
            self._leases.add(lease, self._spawn(self._work(lease, runtime)), installed)

    async def _work(self, lease: Lease, runtime: ActorRuntime) -> None:
        runner = runtime.runner_of(lease)
        group = await run_group(lease, runner, on_progress=lambda: self._leases.moved(lease))
        # Not reached when cancelled: the lease is off the table then, and another task may have its place.
        self._leases.finish(lease)
        self._activity.add(group)
        self.client.send_group(sendable(group, lease, self._limits))
        self._update_progress_soon()
        dead = runtime.engine.stats().extra.get("dead") or runner.executor.exhausted
        if group.reason == ReturnReason.ENGINE_ERROR and dead:
            self._fail(group.detail)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    async def _report_progress(self) -> None:
        while True:
            self._leases.drop_stuck(self._limits)
            self._stuck = self._leases.stuck(self._limits)
            self._update_progress()
            self._log_activity()
            await asyncio.sleep(PROGRESS_S)

    def _log_activity(self) -> None:
        runtime = self._runtime
        if runtime is None or runtime.engine.installed is None:
            return
        line = self._activity.line(self._clock(), runtime.engine.stats().tokens_total, runtime.engine.installed)
        if line:
            log.info("%s", line)

    def _update_progress_soon(self) -> None:
        """Update once for all groups that end in this pass of the event loop: it costs as much as there are leases."""
        if not self._progress_due:
            self._progress_due = True
            asyncio.get_running_loop().call_soon(self._update_progress)

    def _update_progress(self) -> None:
        """Update the numbers of the next heartbeat."""
        self._progress_due = False
        held, num_train = self._leases.held, self._leases.num_train
        stuck = tuple(ref for ref in self._stuck if ref in held)
        runtime = self._runtime
        if runtime is None:
            self.client.update(Progress(running=len(held), held=held, stuck=stuck))
            return
        stats = runtime.engine.stats()
        numbers = {"busy_s": stats.busy_s, "waiting": float(stats.waiting), **runtime.load.numbers()}
        numbers |= environment_calls(runtime) | self._use.numbers | {"given_back_bytes": float(self._given_back)}
        if runtime.device_weights is not None:
            numbers["abandoned_threads"] = float(runtime.device_weights.num_abandoned_threads)
        ready = runtime.engine.installed is not None and not self._draining
        free = runtime.num_free_leases(num_train)
        self.client.update(Progress(
            max_leases=max(runtime.max_leases, num_train + free), free=free if ready else 0,
            free_eval=max(0, runtime.engine.max_num_seqs - (len(held) - num_train)) if ready else 0,
            running=len(held), tokens_total=stats.tokens_total, held=held, stuck=stuck, stats=numbers,
        ))

    # --- tasks --------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._jobs.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the actor failed: %r", error, exc_info=error)
            self._end(1, repr(error))

    async def _close(self) -> bool:
        """False if something hangs; see `RuntimeHandle.close`."""
        for task in list(self._jobs):
            task.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        try:
            return await self._handle.close()
        finally:
            self.client.close()
