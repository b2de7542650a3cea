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

from actors import EXIT_RESTART, EXIT_WRONG_RUN
from streamrl import parent_watch
from streamrl.commands import exit_at_once
from streamrl.errors import ConfigError
from streamrl.messages.printable import printable_lines, start_log
from streamrl.process_memory import uncollected
from streamrl.processes import keep_private

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
        from actors.worker import make_worker

        worker = make_worker(endpoint, overrides)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.leave, signal.Signals(number).name)
    parent_watch.watch(lambda: loop.call_soon_threadsafe(worker.launcher_gone))
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
