"""streamrl actor connect=tcp://HOST:PORT [key=value ...]

Start as many as you like, wherever the address can be reached, before or after the learner; stop them at any time.
Model, task and sampling come from the learner; `actors.*` and other words given here override them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys

import zmq

from actors import EXIT_RESTART, EXIT_WRONG_RUN
from streamrl import parent_watch
from streamrl.commands import exit_at_once
from streamrl.errors import ConfigError
from streamrl.messages.printable import printable_lines, start_log
from streamrl.process_memory import uncollected
from streamrl.processes import keep_private
from streamrl.version import __version__

log = logging.getLogger("streamrl.actor")

USAGE = __doc__ or ""


def parse(words: list[str]) -> tuple[str, list[str]]:
    """(endpoint, other words). Raises ConfigError without a usable connect=."""
    connects = [word.partition("=")[2] for word in words if word.startswith("connect=")]
    others = [word for word in words if not word.startswith("connect=")]
    if len(connects) != 1 or not re.fullmatch(r"tcp://[^\s/]+:\d{1,5}", connects[0]):
        raise ConfigError(f"give one address, connect=tcp://HOST:PORT; got {connects or 'none'}\n\n{USAGE}")
    return connects[0], others


async def work(endpoint: str, overrides: list[str]) -> int:
    """Work until the hub or a signal ends it; returns the exit code."""
    with uncollected():
        from actors.engines.base import engine_factory, wire_name
        from actors.runtime import build_runtime, default_actor_id, has_processes, weight_source
        from actors.settings import local_settings, max_leases, pick_device
        from actors.worker import Worker
        from streamrl.transport.client import HubClient
        from streamrl.transport.keys import read_actor_key
        from streamrl.transport.session import ActorSession
        from streamrl.weights.gpu.cuda_memory import device_id

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
    worker = Worker(
        client, lambda welcome: build_runtime(welcome, overrides, source, device_weights),
        has_processes=lambda welcome: has_processes(welcome, overrides),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.leave, signal.Signals(number).name)
    parent_watch.watch(lambda: loop.call_soon_threadsafe(worker.launcher_gone))
    log.info("actor %s: connecting to %s", session.actor_id, endpoint)
    closed = await worker.run()
    log.info("exiting: %s (exit code %d)", closed.detail, closed.exit_code)
    return closed.exit_code


def main() -> int:
    keep_private()
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0 if words else 2
    for number in (signal.SIGINT, signal.SIGTERM):  # until there is a loop: it has nothing to hand back yet
        signal.signal(number, signal.SIG_DFL)
    parent_watch.end_with_parent()
    start_log("actor")
    try:
        endpoint, overrides = parse(words)
        # Not asyncio.run: it would wait without limit for threads, and one may be stuck in a call to a device.
        exit_code = asyncio.new_event_loop().run_until_complete(work(endpoint, overrides))
    except ConfigError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2
    if exit_code in (EXIT_WRONG_RUN, EXIT_RESTART):
        what = "another run" if exit_code == EXIT_WRONG_RUN else "the run with other settings"
        log.info("%s is at %s now: joining it", what, endpoint)
        parent_watch.renew()
        os.execv(sys.executable, [*parent_watch.program("actors"), *words])
    return exit_code


if __name__ == "__main__":
    exit_at_once(main())
