"""streamrl bundle RUN: one file with which others can verify a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl.commands import parser_of, say
from streamrl.config.load import run_settings
from streamrl.config.schema import Config
from streamrl.errors import ControlError
from streamrl.named_code import is_own
from streamrl.stream.archive import pack, sha256_of
from streamrl.stream.history import History
from streamrl.stream.segments import FOLDER, segments
from streamrl.verbs.runs import find_run
from streamrl.version import __version__

FORMAT = 1
FILES = (
    "config.yaml", "config.json", "run.json", "run_id", "assets.msgpack", "metrics.jsonl", "evaluations.jsonl",
    "summary.json", "report.html",
)
SMALL_BYTES = 64 << 20
"""A starting model of at most so many bytes goes along unasked."""
START_MODEL = "start_model"
INPUTS = ("env.path", "data.path", "data.test_path")
"""Settings that name files of the task: their digests go along, they do not. Bundles hold no code and no data set."""


def bundle(words: list[str]) -> int:
    parser = parser_of(
        "bundle", "Write one file with which others can verify a run that has ended: settings, versions of packages, "
        "the log of all that was trained on, metrics, evaluations, report. It holds prompts and answers.",
        find=find_run, epilog="Then: streamrl verify FILE",
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="by default RUN.bundle.tar here")
    parser.add_argument("--with-model", action="store_true", help="with the starting model, however large it is")
    parser.add_argument("--with-checkpoints", action="store_true", help="with all checkpoints: steps are verified "
                        "from the nearest one, not from the beginning")
    given = parser.parse_args(words)
    run = given.run
    if run.has_hub or run.has_launcher:
        raise ControlError(f"{run.name} is running: only a run that has ended can be bundled; let it finish or stop it")
    out = given.out or Path(f"{run.name}.bundle.tar")
    if out.exists():
        raise ControlError(f"{out} already exists: remove it, or give another --out FILE")
    files, about = contents(run.path, with_model=given.with_model, with_checkpoints=given.with_checkpoints)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            digest = pack(files, about, file, lambda name, size: say(f"  {name}  {size:,} bytes", error=True))
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    print(f"{out}  {out.stat().st_size:,} bytes, {len(files)} files, {about['batches']} batches")
    print(f"sha256 of its manifest: {digest}")
    return 0


def contents(run_dir: Path, *, with_model: bool, with_checkpoints: bool) -> tuple[dict[str, Path], dict[str, Any]]:
    """The files of a run's bundle, and what its manifest says of the run. Raises ControlError, LogError."""
    history = History.read(run_dir)
    if not history.batches or not history.starts:
        raise ControlError(f"the log of {run_dir} holds no batch, so there is nothing to verify: let it train first")
    files = {name: run_dir / name for name in FILES if (run_dir / name).exists()}
    files |= {f"{FOLDER}/{one.path.name}": one.path for one in segments(run_dir)}
    files |= {f"evals/{path.name}": path for path in sorted((run_dir / "evals").glob("*.json*"))}
    for folder in _checkpoints(run_dir, history, complete=history.first == 1, every=with_checkpoints):
        files |= {f"{folder.name}/{path.name}": path for path in sorted(folder.iterdir())}
    config, own = run_settings(run_dir), is_own(run_dir / "config.yaml")
    if not own:
        _refuse_links(run_dir, files)
    # What somebody else's settings call the model could be any folder of this machine: it goes along if asked for.
    model = _start_model(config, run_dir) if with_model or own else {}
    if with_model and not model and not config.policy.tiny.enabled:
        raise ControlError(f"the starting model {config.policy.model_path} is no folder here: leave out --with-model")
    if with_model or sum(path.stat().st_size for path in model.values()) <= SMALL_BYTES:
        files |= model
    last = history.starts[-1]
    return files, {
        "format": FORMAT, "streamrl": __version__, "run_id": last.run_id, "batches": len(history.batches),
        "environment": last.environment, "start_model": {name: sha256_of(path) for name, path in model.items()},
        "inputs": dict(_inputs(config)),
    }


def _refuse_links(run_dir: Path, files: Mapping[str, Path]) -> None:
    """Raise ControlError for a link of somebody else's that would put another file of this machine into the bundle."""
    for name, path in files.items():
        if not (target := path.resolve()).is_relative_to(run_dir.resolve()):
            raise ControlError(
                f"{run_dir} is not signed as a run of yours, and its {name} is a link to {target}: put the file itself "
                "there if it may go along"
            )


def _checkpoints(run_dir: Path, history: History, *, complete: bool, every: bool) -> Iterator[Path]:
    """The checkpoint that the log begins at, where its beginning is gone; or all of them."""
    first = history.batches[0].cut.version
    usable = [path for path in sorted(run_dir.glob("ckpt-[0-9]*")) if int(path.name[5:]) >= first]
    if not usable and not complete:
        raise ControlError(
            f"the log of {run_dir} begins with the batch for version {first}, and no checkpoint from there on is left "
            "to begin from: it cannot be verified (stream.keep, checkpoint.num_keep)"
        )
    if every:
        yield from usable
    elif not complete:
        yield usable[0]


def _start_model(config: Config, run_dir: Path) -> dict[str, Path]:
    """The files of the model that the run started from; a tiny one is kept in its directory."""
    tiny, named = config.policy.tiny.enabled, config.policy.model_path
    folder = run_dir / START_MODEL if tiny else Path(named or "")
    if not (tiny or named) or not folder.is_dir():
        return {}
    kept = (path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".safetensors", ".jinja", ".txt"))
    return {f"{START_MODEL}/{path.name}": path for path in kept}


def _inputs(config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    for setting in INPUTS:
        section, name = setting.split(".")
        path = getattr(getattr(config, section), name)
        if isinstance(path, str):
            there = Path(path).is_file()
            yield setting, {"path": path, "sha256": sha256_of(Path(path)) if there else ""}
