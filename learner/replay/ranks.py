"""As many ranks as the run had: sums over ranks have another order for another number."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from streamrl.parent_watch import program
from streamrl.stream.records import RunStarted
from streamrl.stream.segments import read_records


def join_ranks(run_dir: Path, module: str) -> None:
    """This process becomes the ranks of the run, each of which runs the module again, unless it is one already."""
    starts = [body for _, body in read_records(run_dir) if isinstance(body, RunStarted)] if run_dir.is_dir() else []
    num = int(starts[-1].environment.get("ranks", "1")) if starts else 1
    if num > 1 and "RANK" not in os.environ:
        command = [
            *program("torch.distributed.run"), f"--nproc_per_node={num}", "--standalone", "-m", module, *sys.argv[1:],
        ]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(command[0], command)
