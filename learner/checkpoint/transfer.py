"""Checkpoint files between learner ranks whose machines share no file system; all of it collective.

Rank 0's run directory is the run's: what others wrote is brought there before a checkpoint becomes visible, and what a
restart needs is taken from there. Where the directory is shared nothing moves.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from learner.ranks.mesh import Ranks
from streamrl.errors import CheckpointError

PIECE_BYTES = 64 << 20


def collect(draft: Path, names: Sequence[str], ranks: Ranks) -> None:
    """Bring every rank's file to rank 0, if it does not see them; `names` are in the order of ranks."""
    missing = ranks.rank == 0 and not all((draft / name).exists() for name in names)
    if ranks.mesh.world == 1 or not ranks.from_rank_zero(float(missing)):
        return
    errors = [_send(draft / name, source, ranks, takes=missing) for source, name in enumerate(names) if source]
    if ranks.rank:
        shutil.rmtree(draft)
    _raise_together(errors, draft, ranks)


def distribute(folder: Path, ranks: Ranks) -> None:
    """Give rank 0's checkpoint to every rank that does not see it; an older one of the same name is replaced."""
    if ranks.mesh.world == 1:
        return
    names = sorted(path.name for path in folder.iterdir()) if ranks.rank == 0 else []
    stamp = ranks.bytes_from_rank_zero(_stamp(folder))
    names = json.loads(ranks.bytes_from_rank_zero(json.dumps(names).encode()))
    lacks = _stamp(folder) != stamp
    if not ranks.maximum(float(lacks)):
        return
    if lacks:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    _raise_together([_send(folder / name, 0, ranks, takes=lacks) for name in names], folder, ranks)


def _stamp(folder: Path) -> bytes:
    manifest = folder / "manifest.json"  # it has the digests of all files
    return xxhash.xxh3_128_digest(manifest.read_bytes()) if manifest.exists() else b""


def _raise_together(errors: Sequence[OSError | None], folder: Path, ranks: Ranks) -> None:
    mine = next((error for error in errors if error is not None), None)
    if ranks.maximum(float(mine is not None)):
        raise CheckpointError(
            f"{folder.name} was not passed between machines ({mine or 'another rank could not write'}): check the "
            "space in the run directory of each"
        )


def _send(path: Path, source: int, ranks: Ranks, *, takes: bool) -> OSError | None:
    """One file, piece by piece, from rank `source` to all; kept where `takes`. Returns what went wrong meanwhile."""
    sends, failure = ranks.rank == source, None
    num_bytes = int(ranks.maximum(float(path.stat().st_size if sends else 0)))
    draft = path.with_name(f"{path.name}.tmp-{ranks.rank}")  # two ranks of one machine may lack the same file
    with ExitStack() as files:
        file: IO[bytes] | None = None
        if sends or takes:
            file = files.enter_context(open(path if sends else draft, "rb" if sends else "wb"))
        for start in range(0, num_bytes, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, num_bytes - start), dtype=torch.uint8, device=ranks.device)
            if sends and file is not None:
                piece.copy_(torch.from_numpy(np.frombuffer(file.read(len(piece)), dtype=np.uint8).copy()))
            with ranks.activity.in_collective("broadcast"):
                dist.broadcast(piece, src=source, group=ranks.group)
            if takes and file is not None and failure is None:
                failure = _write(file, piece)
        if takes and file is not None and failure is None:
            file.flush()
            os.fsync(file.fileno())
    if takes and failure is None:
        os.replace(draft, path)
    return failure


def _write(file: IO[bytes], piece: torch.Tensor) -> OSError | None:
    try:
        file.write(piece.cpu().numpy().tobytes())
    except OSError as error:  # the others are in the next broadcast: this rank must be, too
        return error
    return None
