"""Where a run lives: `<root>/<name>-<number>`, or exactly where the user says."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.schema import Config
from streamrl.errors import ConfigError


def choose_run_dir(config: Config) -> Path:
    """The directory of this run; a new numbered one is made here.

    A new run takes the next free number; `checkpoint.resume=true` takes the newest existing one of this name.

    Raises:
        ConfigError: nothing to resume, or `run.dir` already holds a run and resuming was not asked for.
    """
    if config.run.dir is not None:
        run_dir = Path(config.run.dir)
        if has_run(run_dir) and not config.checkpoint.resume:
            raise ConfigError(
                f"run.dir={run_dir} already holds a run: add checkpoint.resume=true to go on with it, or choose another"
            )
        return run_dir
    numbers = sorted(_numbers(Path(config.run.root), config.run.name))
    if config.checkpoint.resume:
        if not numbers:
            raise ConfigError(
                f"checkpoint.resume=true, but there is no run {config.run.name}-* in {config.run.root}/: "
                "start one without it, or name its directory with run.dir=..."
            )
        return numbered_run_dir(config, numbers[-1])
    number = numbers[-1] if numbers else 0
    while True:  # somebody else may take a number between our look and our step: only mkdir knows
        number += 1
        run_dir = numbered_run_dir(config, number)
        try:
            run_dir.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        return run_dir


def numbered_run_dir(config: Config, number: int) -> Path:
    return Path(config.run.root) / f"{config.run.name}-{number:03d}"


def has_run(run_dir: Path) -> bool:
    """Whether a learner has ever started here."""
    return (run_dir / "EPOCH").exists()


def _numbers(root: Path, name: str) -> list[int]:
    if not root.is_dir():
        return []
    tails = [path.name.removeprefix(f"{name}-") for path in root.iterdir() if path.name.startswith(f"{name}-")]
    return [int(tail) for tail in tails if tail.isdigit()]
