"""python -m learner.hub SETTINGS: started by learner rank 0, ends with it."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from pathlib import Path

from learner.hub.context.settings import read_settings
from learner.hub.server import serve
from streamrl.errors import StreamrlError
from streamrl.messages.printable import start_log
from streamrl.parent_watch import watch
from streamrl.processes import keep_private
from streamrl.transport.keys import RankKeys
from streamrl.transport.peers import raise_descriptor_limit
from streamrl.weights.shm.directory import remove_run_dir


def main() -> int:
    keep_private()
    settings = read_settings(Path(sys.argv[1]))
    start_log("hub")
    raise_descriptor_limit()
    # Ctrl-C reaches the whole foreground group; the learner decides what it means for its hub.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent_gone: list[bool] = []
    watch(lambda: parent_gone.append(True))
    try:
        # Freeze libraries and the ledger so far: no collection needs to scan them.
        serve(settings, lambda: bool(parent_gone), rank_keys=RankKeys.from_environment(), ready=gc.freeze)
    except StreamrlError as error:
        logging.getLogger("streamrl.hub").error("%s", error)
        return 2
    if parent_gone:
        for folder in (Path(settings.shm_dir), Path(settings.run_dir) / "weights"):
            remove_run_dir(folder, settings.run_id, wait_s=5.0)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
