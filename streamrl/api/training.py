"""`streamrl.train`: a run from a script or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamrl.errors import RunFailedError
from streamrl.launch import EXIT_INTERRUPTED, launch_run
from streamrl.metrics.summary import Summary


def train(experiment: str | None = None, overrides: Sequence[str] = ()) -> Summary:
    """Do the run that `streamrl launch` does with these overrides, in the same processes, and wait for its end.

    Example:
        summary = streamrl.train(experiment="quickstart", overrides=["trainer.num_steps=5"])
        run = streamrl.load_run(summary.extra["run_dir"])

    Args:
        experiment: a file of configs/experiment/; None takes the defaults.
        overrides: `key=value`, as on the command line.
    Returns:
        the summary of the run, with its directory in `extra["run_dir"]`.
    Raises:
        ConfigError: a setting is unknown or impossible; nothing was started.
        RunFailedError: the run failed; its last lines are on standard error, its logs in the run directory.
        KeyboardInterrupt: after Ctrl-C, once everything is stopped; the run can be resumed.
    """
    chosen = [] if experiment is None else [f"experiment={experiment}"]
    run_dir, code = launch_run([*chosen, *overrides])
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"run.dir={run_dir} checkpoint.resume=true continues this run")
    if code != 0:
        raise RunFailedError(f"The run ended with status {code}: see {run_dir / 'logs'}", code)
    summary = Summary.load(run_dir / "summary.json")
    return replace(summary, extra={**summary.extra, "run_dir": str(run_dir)})
