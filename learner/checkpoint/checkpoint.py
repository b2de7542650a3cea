"""Checkpoints that are either whole or not there, and whose every byte is checked before it is believed.

    1  all ranks write their shards into ckpt.tmp-<version>-<random>/, flushed to disk, read back for their digests
    2  rank 0 writes the blobs and manifest.json: sizes and xxh3-128 of every file, and what the run must remember
    3  rename to ckpt-<version>/, then LATEST points to it; only now may another process learn that it exists
       (under checkpoint.directory the first is there, and the run directory has a link to it)
    4  all but the newest few are removed

Loading tries LATEST and then older ones; a damaged file is named in a warning and its checkpoint passed over. If there
are checkpoints and none is good, that is an error: silently starting from scratch would be worse. A `ResumeState` is
what a run goes on from: its name, its newest good checkpoint, its surviving versions.

Rank 0's run directory is the run's: what other machines wrote is brought there before a checkpoint becomes visible
(`collect`), and what a restart needs is taken from there (`distribute`). Where the directory is shared nothing moves.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from learner.checkpoint.run_lock import RunLock, sync_directory, write_durably
from learner.checkpoint.shards import Copied, ShardReader, read_training_tensors, training_tensors, write_shards
from learner.ranks.mesh import Ranks
from streamrl.errors import CheckpointError, ConfigError, RunLockedError, one_sentence
from streamrl.messages import Lineage
from streamrl.metrics.files import read_object, text_of, write_atomic

log = logging.getLogger("streamrl.checkpoint")
FORMAT = 1
HOME_NOTE = "checkpoints.json"
"""In a run directory: its path, and the name of its folder in `checkpoint.directory`."""
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose digests were all right when it was opened."""

    path: Path
    version: int
    world: int
    extra: Mapping[str, Any]
    blobs: Mapping[str, bytes]

    def restore(self, policy: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        """Put weights, optimizer state and random generators back. Raises CheckpointError for another model."""
        reader = self.shards()
        read_training_tensors(reader, policy, optimizer)
        generators = reader.generator_states(ranks.rank)
        torch.set_rng_state(generators["rng/cpu"])
        if "rng/cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["rng/cuda"])

    def shards(self) -> ShardReader:
        """All tensors in it, for any number of ranks."""
        return ShardReader([self.path / _shard_name(rank, self.world) for rank in range(self.world)])


def save_checkpoint(
    run_dir: Path | str, version: int, policy: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, *,
    also: Iterable[tuple[str, Tensor]] = (), **what: Any,
) -> Path:
    """`write_checkpoint` of a policy and its optimizer.

    Args:
        also: (key, tensor) of more tensors, sharded as the policy's; read them back from `Checkpoint.shards()`. Keys
            must not begin with model/, optim/ or rng/.
    """
    return write_checkpoint(run_dir, version, training_tensors(policy, optimizer, also), ranks, **what)


def write_checkpoint(
    run_dir: Path | str, version: int, tensors: Iterable[tuple[str, Tensor]] | Copied, ranks: Ranks, *,
    extra: Mapping[str, Any], blobs: Mapping[str, bytes], num_keep: int, lock: RunLock | None = None,
    home: Path | None = None,
) -> Path:
    """Write `ckpt-<version>` and point LATEST at it; a collective call. When it returns, the checkpoint is durable.

    Args:
        tensors: (key, tensor) of what is saved, or a copy of it.
        extra: anything that JSON holds (learner_epoch, lineage, ...), of rank 0.
        blobs: name -> bytes (the ledger's state), of rank 0.
        num_keep: this many checkpoints stay, at least one.
        lock: checked right before the checkpoint becomes visible.
        home: the folder of this run's checkpoints elsewhere, as `checkpoint_home` made it.
    Raises:
        CheckpointError: a rank could not write; on every rank, with nothing made visible.
        RunLockedError: a newer learner owns the run; on every rank.
    """
    run_dir = Path(run_dir)
    tag = ranks.from_rank_zero(float(secrets.randbits(40)))
    draft = (home or run_dir) / f"ckpt.tmp-{version}-{int(tag):010x}"
    no_draft = _failure_of(partial(draft.mkdir, parents=True, exist_ok=True))
    entries, failure = _write_rank_shards(draft, tensors, ranks, blobs if ranks.rank == 0 else {})
    _agree(no_draft or failure, draft, version, ranks)
    files = _gather_entries(entries, ranks, blobs)
    collect(draft, [_shard_name(rank, ranks.mesh.world) for rank in range(ranks.mesh.world)], ranks)
    final, failure = run_dir / f"ckpt-{version:08d}", None
    if ranks.rank == 0:
        body = {"format": FORMAT, "version": version, "world": ranks.mesh.world, "files": files, "extra": dict(extra)}
        failure = _failure_of(lambda: write_durably(draft / "manifest.json", _manifest_bytes(body)))
    _agree(failure, draft, version, ranks)
    if ranks.maximum(float(lock is not None and not lock.is_owner())):
        raise RunLockedError(f"version {version} was not saved: a newer learner owns {run_dir}; this one must end")
    if ranks.rank == 0:
        failure = _failure_of(lambda: _publish(draft, final))
    _agree(failure, draft, version, ranks)
    if ranks.rank == 0:
        prune(run_dir, num_keep=num_keep, newest=version, home=home)
    ranks.barrier()
    return final


def checkpoint_home(directory: str | None, run_id: str, run_dir: Path) -> Path | None:
    """The folder of a run's checkpoints in `checkpoint.directory`, made; None without one. Raises ConfigError.

    A copy of a run has the run's id, and a folder of its own: what it saves and removes must not be the other's.
    """
    if directory is None:
        return None
    note, here = run_dir / HOME_NOTE, run_dir.resolve()
    told = read_object(note)
    owner, name = Path(str(told.get("run", here))), str(told.get("folder", run_id))
    if not re.fullmatch(re.escape(run_id) + "(-[0-9a-f]{8})?", name):  # whose note? no folder but the run's is written
        name = run_id
    known = owner / "run_id"
    if owner != here and known.is_file() and text_of(known).strip() == run_id:  # else the run was moved
        name = f"{run_id}-{xxhash.xxh3_64_hexdigest(os.fsencode(here))[:8]}"  # the same on every rank
    home = Path(directory).expanduser().resolve() / name
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if told != (own := {"run": str(here), "folder": name}):
            write_atomic(note, json.dumps(own))
    except OSError as error:
        raise ConfigError(f"checkpoint.directory={directory}: choose another one: {one_sentence(error)}") from error
    return home


def _failure_of(write: Callable[[], None]) -> OSError | None:
    try:
        write()
    except OSError as error:
        return error
    return None


def _agree(failure: Exception | None, draft: Path, version: int, ranks: Ranks) -> None:
    """Raise CheckpointError on every rank if one failed; the draft leaves the disk, which may be full by it."""
    if ranks.maximum(float(failure is not None)):
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"version {version} was not saved: {failure or 'another rank could not write'}")


def find_checkpoint(run_dir: Path | str, ranks: Ranks | None = None) -> Checkpoint | None:
    """The newest good checkpoint, every digest checked; None if there is none at all. A collective call.

    Raises CheckpointError: there are some, and none is good.
    """
    ranks = ranks or Ranks()
    chosen, failure = None, None
    if ranks.rank == 0:  # it reads every file, the others follow
        try:
            chosen = _newest_good(Path(run_dir))
        except CheckpointError as error:
            failure = error
    version = int(ranks.from_rank_zero(-2.0 if failure else -1.0 if chosen is None else float(chosen.version)))
    if version == -2:
        raise failure or CheckpointError(f"rank 0 found no good checkpoint in {run_dir}")
    if version == -1:
        return None
    path = Path(run_dir) / f"ckpt-{version:08d}"
    distribute(path, ranks)
    return chosen if ranks.rank == 0 else _open(path, check_files=False)


def checkpoint_at(run_dir: Path | str, version: int) -> Checkpoint | None:
    """The newest good checkpoint of at most this version; None if there is none."""
    found = _versions(Path(run_dir))
    for one in sorted((one for one in found if one <= version), reverse=True):
        try:
            return _open(found[one], check_files=True)
        except CheckpointError as error:
            log.warning("%s is damaged and skipped: %s", found[one].name, error)
    return None


def prune(run_dir: Path, *, num_keep: int, newest: int, home: Path | None = None) -> None:
    """Remove drafts and all but the newest `num_keep` checkpoints up to `newest`; of links, what is in `home` too.

    Versions above `newest` were made by a history that a restart from an older checkpoint has left.
    """
    versions = _versions(run_dir)
    kept = sorted((version for version in versions if version <= newest), reverse=True)[: max(1, num_keep)]
    dropped = [path for version, path in versions.items() if version not in kept]
    for path in (*dropped, *run_dir.glob("ckpt.tmp-*"), *(home.glob("ckpt.tmp-*") if home else ())):
        if (failure := _failure_of(partial(_remove, path, home))) is not None:
            log.warning("%s is not needed any more and was not removed: %s", path, failure)


def _remove(path: Path, home: Path | None) -> None:
    if not path.is_symlink():
        shutil.rmtree(path)
        return
    if home is not None and path.resolve().parent == home:  # where a link leads otherwise is nobody's to remove
        shutil.rmtree(path.resolve())
    path.unlink()


def _write_rank_shards(
    draft: Path, tensors: Iterable[tuple[str, Tensor]] | Copied, ranks: Ranks, blobs: Mapping[str, bytes]
) -> tuple[list[tuple[int, bytes]], Exception | None]:
    """Sizes and digests of this rank's files, or the error."""
    try:
        paths = [draft / _shard_name(ranks.rank, ranks.mesh.world)]
        write_shards(paths[0], tensors, ranks)
        for name in sorted(blobs):
            paths.append(draft / f"{name}.bin")
            paths[-1].write_bytes(blobs[name])
        for path in paths:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        return [(path.stat().st_size, _digest(path)) for path in paths], None
    except (OSError, SafetensorError) as error:
        return [], error


def _gather_entries(
    entries: list[tuple[int, bytes]], ranks: Ranks, blobs: Mapping[str, bytes]
) -> dict[str, dict[str, Any]]:
    """File name -> size and digest, of all ranks; digests travel as small integers."""
    rows = ranks.gather_world([float(x) for size, digest in entries for x in (size, *digest)])
    files = {}
    for rank, flat in enumerate(rows):
        names = [_shard_name(rank, ranks.mesh.world), *(f"{name}.bin" for name in sorted(blobs) if rank == 0)]
        for name, start in zip(names, range(0, len(flat), 17), strict=False):
            digest = bytes(int(x) for x in flat[start + 1 : start + 17]).hex()
            files[name] = {"bytes": int(flat[start]), "xxh3_128": digest}
    return files


def _publish(draft: Path, final: Path) -> None:
    sync_directory(draft)
    place = draft.with_name(final.name)
    for path in {place, final}:  # left by a history that a restart has abandoned; LATEST does not point to it
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            os.replace(path, path.with_name(f"ckpt.tmp-old-{secrets.token_hex(4)}"))
    os.replace(draft, place)
    sync_directory(place.parent)
    if place != final:
        final.symlink_to(place, target_is_directory=True)
        sync_directory(final.parent)
    write_durably(final.parent / "LATEST", f"{final.name}\n".encode())


def _newest_good(run_dir: Path) -> Checkpoint | None:
    candidates = _candidates(run_dir)
    for path in candidates:
        try:
            return _open(path, check_files=True)
        except CheckpointError as error:
            log.warning("%s is damaged and skipped: %s", path.name, error)
    if lost := [path for path in run_dir.glob("ckpt-*") if path.is_symlink() and not path.exists()]:
        raise CheckpointError(
            f"{lost[0]} leads to {lost[0].readlink()}, which is not there: restore the disk of checkpoint.directory"
        )
    if not candidates:
        return None
    raise CheckpointError(
        f"{run_dir} has {len(candidates)} checkpoints and none is good (see the warnings above): restore one from a "
        "backup, or start a new run."
    )


def _candidates(run_dir: Path) -> list[Path]:
    """LATEST, then older ones, newest first; then those above LATEST, whose saving was cut short after the rename."""
    versions, named = _versions(run_dir), text_of(run_dir / "LATEST").strip()
    latest = next((v for v, path in versions.items() if path.name == named), None)
    if latest is None and named:
        log.warning("LATEST names %r, which is not there: trying the newest checkpoint", named)
    return [versions[v] for v in sorted(versions, key=lambda v: (latest is not None and v > latest, -v))]


def _versions(run_dir: Path) -> dict[int, Path]:
    tails = ((path.name.removeprefix("ckpt-"), path) for path in run_dir.glob("ckpt-*") if path.is_dir())
    return {int(tail): path for tail, path in tails if tail.isdigit()}


def _open(path: Path, *, check_files: bool) -> Checkpoint:
    body = _read_manifest(path / "manifest.json")
    try:
        for name, entry in body["files"].items() if check_files else ():
            _check_file(path / name, entry)
        blobs = {name.removesuffix(".bin"): (path / name).read_bytes()
                 for name in body["files"] if name.endswith(".bin")}
    except OSError as error:
        raise CheckpointError(one_sentence(error)) from error
    return Checkpoint(path, body["version"], body["world"], body["extra"], blobs)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        body = json.loads(raw)["body"]
        intact = raw == _manifest_bytes(body) and body["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    if not intact:
        raise CheckpointError(f"{path.name} does not match its own digest, or is not of format {FORMAT}")
    return body


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    found = {"bytes": path.stat().st_size, "xxh3_128": _digest(path).hex()}
    if found != entry:
        raise CheckpointError(f"{path.name} is {found}, the manifest says {dict(entry)}")


def _manifest_bytes(body: Mapping[str, Any]) -> bytes:
    """One JSON object: the body and the digest of its canonical text. A reader accepts exactly these bytes."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f'{{"xxh3_128":"{xxhash.xxh3_128_hexdigest(text.encode())}","body":{text}}}\n'.encode()


def _digest(path: Path) -> bytes:
    """xxh3-128 of the bytes that the file system gives back, not of those meant to be written."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return state.digest()


def _shard_name(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


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
    """Send one file, piece by piece, from rank `source` to all; kept where `takes`. Returns the error of a write."""
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


@dataclass(frozen=True)
class ResumeState:
    """The run so far, from its checkpoint; the defaults are a run that has none."""

    run_id: str
    version: int = 0
    lineage: tuple[Lineage, ...] = ()
    wall_s: float = 0.0
    trained_tokens: int = 0
    checkpoint: Checkpoint | None = None

    @property
    def controls(self) -> Mapping[str, Any]:
        """State of the controllers, by name; empty without a checkpoint, or in one older than they are."""
        return self.checkpoint.extra.get("controls", {}) if self.checkpoint is not None else {}


def find_resume_state(
    run_dir: Path, ranks: Ranks, *, resume: bool, name: str = "", num_minibatches: int = 1, num_epochs: int = 1
) -> ResumeState:
    """The state to resume from; a collective call.

    Args:
        resume: look for a checkpoint.
        name: what the id of a new run begins with.
        num_minibatches, num_epochs: of a batch, which a resumed run must have as many of.
    Raises:
        CheckpointError: there are checkpoints, and none of them is good.
        ConfigError: the checkpoint belongs to another run, or to one with other optimizer steps a batch.
    """
    found = find_checkpoint(run_dir, ranks) if resume else None
    file, own = run_dir / "run_id", ""
    if ranks.rank == 0:
        own = text_of(file).strip()
        if not re.fullmatch(r"[\w.-]+", own):  # a new run, or a file that was damaged
            safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name.lower())[:48]
            own = found.extra["run_id"] if found is not None else f"{safe}-{secrets.token_hex(4)}"
            write_durably(file, own.encode())
    run_id = ranks.bytes_from_rank_zero(own.encode()).decode()
    if found is None:
        if resume:
            log.warning("no checkpoint in %s yet: starting from version 0 and the batches in the log", run_dir)
        return ResumeState(run_id)
    extra: Mapping[str, Any] = found.extra
    if extra["run_id"] != run_id:
        raise ConfigError(f"{found.path} belongs to run {extra['run_id']}, {run_dir} to {run_id}: do not mix them")
    steps, before = num_minibatches * num_epochs, extra.get("steps_per_batch", 1)
    if steps != before:  # versions would no longer tell how many batches were trained
        raise ConfigError(
            f"learner.num_minibatches={num_minibatches} x learner.num_epochs="
            f"{num_epochs} are {steps} optimizer steps per batch, and {found.path} was trained with "
            f"{before}: resume with as many, or start a new run from its exported model."
        )
    lineage = tuple(Lineage(*row) for row in extra["lineage"])
    log.info("resuming from %s (version %d)", found.path, found.version)
    return ResumeState(run_id, found.version, lineage, extra["wall_s"], int(extra["trained_tokens"]), found)


def surviving_lineage(past: ResumeState, epoch: int) -> tuple[Lineage, ...]:
    """The known versions after a restart: earlier epochs cut at the restored version, then this epoch."""
    cut = (Lineage(row.learner_epoch, row.first, min(row.last, past.version)) for row in past.lineage)
    return (*cut, Lineage(epoch, past.version, past.version))
