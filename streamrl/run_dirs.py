"""Run directories: `<root>/<name>-<number>`, or the one that `run.dir` names."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.schema import Config
from streamrl.errors import ConfigError


def choose_run_dir(config: Config) -> Path:
    """The directory of this run: `run.dir`, the newest of this name to resume, or a new one with the next number.

    Raises:
        ConfigError: nothing to resume, or `run.dir` already holds a run and resuming was not asked for.
    """
    run, resume = config.run, config.checkpoint.resume
    if run.dir is not None:
        run_dir = Path(run.dir)
        if (run_dir / "EPOCH").exists() and not resume:  # a learner has started here
            raise ConfigError(
                f"run.dir={run_dir} already holds a run: add checkpoint.resume=true to continue it, or choose another"
            )
        return run_dir
    tails = [path.name.removeprefix(f"{run.name}-") for path in Path(run.root).glob(f"{run.name}-*")]
    newest = max((int(tail) for tail in tails if tail.isdigit()), default=0)
    if resume and not newest:
        raise ConfigError(
            f"checkpoint.resume=true, but there is no run {run.name}-* in {run.root}/: "
            "start one without it, or name its directory with run.dir=..."
        )
    while not resume:  # another process may take a number between listing and mkdir: only mkdir is atomic
        newest += 1
        try:
            numbered_run_dir(config, newest).mkdir(parents=True)
            break
        except FileExistsError:
            continue
    return numbered_run_dir(config, newest)


def numbered_run_dir(config: Config, number: int) -> Path:
    return Path(config.run.root) / f"{config.run.name}-{number:03d}"
