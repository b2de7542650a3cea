"""Versions of a run that no checkpoint holds: `RUN@137`, rebuilt by a learner that trains the log again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from streamrl.config.load import load_run_config
from streamrl.errors import ConfigError
from streamrl.messages.printable import printable
from streamrl.metrics.files import read_lines, read_object, text_of
from streamrl.parent_watch import program

NAMED = re.compile(r"(.+)@(?:(\d+)|best(?::(.+))?)")
"""A version of a run: runs/quickstart-001@40, @best, or the best on a set of `eval.datasets`, @best:hard."""
FOLDER = "versions"
"""In the run directory: a Hugging Face checkpoint for each version that was asked for."""
NOTE = "replayed.json"
"""In such a folder: how its weights compare with those of the run, and at which start of the run it was made."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def named_version(name: str) -> tuple[Path, int] | None:
    """The run directory and the version of a `RUN@N` or `RUN@best`; None if it is none."""
    found = None if Path(name).exists() else NAMED.fullmatch(name)
    if found is None or not (Path(found[1]) / "config.yaml").exists():
        return None
    run_dir = Path(found[1])
    return run_dir, int(found[2]) if found[2] else best_version(run_dir, found[3] or "")


def require_model(source: str) -> None:
    """Raise ConfigError unless a MODEL_OR_RUN is a run, a version of one, or a folder with a model's config.json."""
    folder = Path(source)
    if named_version(source) is not None or (folder / "config.yaml").exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{source}: no such folder. Give a run, such as runs/NAME, or a Hugging Face checkpoint.")
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):  # adapters: see find_model
        raise ConfigError(f"{source} holds no config.json: give a run (runs/NAME) or a Hugging Face checkpoint.")


class _Evaluation(msgspec.Struct):
    version: int
    dataset: str
    score: float


_EVALUATION = msgspec.json.Decoder(_Evaluation)


def best_version(run_dir: Path, dataset: str = "") -> int:
    """The version with the highest score on a set of evaluations, of equals the earliest.

    Without a name that is the run's own set, or where it evaluates none the mean of all of `eval.datasets`.
    Raises ConfigError: there is no such evaluation.
    """
    scores: dict[int, dict[str, float]] = {}
    for _, row in read_lines(run_dir / "evaluations.jsonl", _EVALUATION.decode):
        scores.setdefault(row.version, {})[row.dataset] = row.score
    known = {name for one in scores.values() for name in one}
    sets = {dataset} if dataset or "" in known else known
    means = {version: fmean(one[name] for name in sets) for version, one in scores.items() if sets <= one.keys()}
    if not means:
        what = f"an evaluation on {dataset}" if dataset else "an evaluation"
        there = f"; it has those of {', '.join(sorted(name or 'its own set' for name in known))}" if known else ""
        raise ConfigError(
            f"{run_dir}@best needs {what}, and the run has none{there}: give a version by its number, as {run_dir}@40"
        )
    return max(sorted(means), key=lambda version: means[version])


def starts_of(run_dir: Path) -> str:
    """Changes whenever the run is started again: what it was at a version may have been another history."""
    return text_of(run_dir / "EPOCH").strip()


def cached(run_dir: Path, version: int) -> Path | None:
    """The folder of a version that was rebuilt since the run's last start."""
    folder = run_dir / FOLDER / str(version)
    note = read_object(folder / NOTE)
    return folder if note and note.get("starts") == starts_of(run_dir) else None


def rebuilt(run_dir: Path, version: int, allow: Sequence[str] = ()) -> Path:
    """The folder of a version; a process of its own rebuilds it first if need be, and shows how far it is.

    Args:
        allow: words for a run of somebody else, as `streamrl at` takes them.
    Raises:
        ConfigError: it cannot be rebuilt; that process has said why.
    """
    if (folder := cached(run_dir, version)) is None:
        load_run_config(run_dir, allow)  # refused here, where what it says is seen
        command = [*program("learner.replay.at"), f"{run_dir}@{version}", *allow]
        env = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env, check=False)
        folder = cached(run_dir, version)
        if done.returncode or folder is None:
            raise ConfigError(
                f"version {version} of {run_dir} could not be rebuilt from its log: see above, or try it alone with "
                f"streamrl at {run_dir}@{version}"
            )
    if read_object(folder / NOTE).get("compared") != "equal":
        print(printable(f"{folder}: {read_object(folder / NOTE).get('compared')}"), file=sys.stderr)
    return folder
