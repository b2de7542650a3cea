"""python -m actors connect=tcp://HOST:PORT [key=value ...]

Start as many as you like, wherever the address can be reached, before or after the learner; stop them at any time.
Model, task and sampling come from the learner; `actors.*` and other words given here win over what it says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys

import zmq

from streamrl import parent_watch as parent_watch
from streamrl.config.load import from_plain
from streamrl.errors import ConfigError
from streamrl.version import __version__

log = logging.getLogger("streamrl.actor")

EXIT_WRONG_RUN, EXIT_RESTART = 6, 11
USAGE = __doc__ or ""


def parse(words: list[str]) -> tuple[str, list[str]]:
    """(endpoint, other words). Raises ConfigError without a usable connect=."""
    connects = [word.partition("=")[2] for word in words if word.startswith("connect=")]
    others = [word for word in words if not word.startswith("connect=")]
    if len(connects) != 1 or not re.fullmatch(r"tcp://[^\s/]+:\d{1,5}", connects[0]):
        raise ConfigError(f"give one address, connect=tcp://HOST:PORT; got {connects or 'none'}\n\n{USAGE}")
    return connects[0], others


async def work(endpoint: str, overrides: list[str]) -> int:
    """One life of this actor; returns the exit code."""
    from actors.runtime import RuntimeBuilder, default_actor_id, lease_slots
    from actors.worker import Worker
    from streamrl.transport.client import HubClient
    from streamrl.transport.session import ActorSession

    local = from_plain({"policy": {"tiny": {"enabled": True}}}, overrides)
    builder = RuntimeBuilder(overrides, local, zmq.Context())
    # Group size and concurrency are the learner's to say; heartbeats name the real number of free slots.
    slots = lease_slots(local.actors.num_concurrent, local.rollout.num_responses_per_prompt)
    link = ActorSession(
        local.actors.actor_id or default_actor_id(), int.from_bytes(os.urandom(7), "little") + 1,
        engine=local.actors.engine.name, slots=slots, transports=builder.transports,
        software=f"streamrl {__version__}", random_seed=os.getpid(), give_up_after_s=local.actors.give_up_after_s,
        device=builder.device_weights.device_id if builder.device_weights is not None else "",
    )
    client = HubClient(endpoint, link)
    if builder.device_weights is not None:
        builder.device_weights.report = client.report_nccl
    worker = Worker(client, builder)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.leave, signal.Signals(number).name)
    parent_watch.watch(lambda: loop.call_soon_threadsafe(worker.leave, "the launcher is gone"))
    log.info("actor %s: connecting to %s", link.actor_id, endpoint)
    gone = await worker.run()
    log.info("ends: %s (exit %d)", gone.detail, gone.exit_code)
    return gone.exit_code


def main() -> int:
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0 if words else 2
    logging.basicConfig(
        level=os.environ.get("STREAMRL_LOG", "INFO").upper(), format="%(asctime)s actor    %(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        endpoint, overrides = parse(words)
        # Not asyncio.run: it would wait without limit for threads, and one may be stuck in a call to a device.
        exit_code = asyncio.new_event_loop().run_until_complete(work(endpoint, overrides))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if exit_code in (EXIT_WRONG_RUN, EXIT_RESTART):
        who = "another run is" if exit_code == EXIT_WRONG_RUN else "the run with its other settings is"
        log.info("%s at %s now: joining it anew", who, endpoint)
        parent_watch.renew()
        os.execv(sys.executable, [sys.executable, "-m", "actors", *words])
    return exit_code


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a running forward pass or reward thread must not hold the process up
