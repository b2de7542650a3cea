"""`streamrl.train` and `streamrl.resume`: a run from a script or a notebook."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamrl.api.inputs import Inputs, Records, Reward
from streamrl.api.overrides import words_of
from streamrl.api.progress import Callback, PythonCaller
from streamrl.api.runs import Run, load_run
from streamrl.errors import ControlError, RunFailedError
from streamrl.launch import EXIT_INTERRUPTED, launch_run
from streamrl.run_dirs import name_or_path
from streamrl.verbs.resume import command_of
from streamrl.verbs.runs import find_run


def train(
    experiment: str | None = None, overrides: Sequence[str] = (), *, reward: Reward | None = None,
    data: Records | None = None, on_step: Callback | None = None, on_evaluation: Callback | None = None,
    quiet: bool = False, **settings: Any,
) -> Run:
    """Do the run that `streamrl launch` does with these settings, in the same processes, and wait for its end.

    Example:
        def exact(completions, answer, **kwargs):
            return [float(one.strip() == right) for one, right in zip(completions, answer)]

        records = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(20) for b in range(25)]
        run = streamrl.train("quickstart", reward=exact, data=records, trainer__num_steps=100)

    Args:
        experiment: a file of configs/experiment/; None takes the defaults.
        overrides: `key=value`, as on the command line.
        reward: a function, in any form that a reward file may have; it is written into the run's directory from its
            source. Or a Python file, a reward's name such as "math", or a mapping of names to weights.
        data: a list of dictionaries, a data set or a DataFrame, which is written there too; {"train": ..., "test": ...}
            with held-out records; or a path or the name of a data set, as `data.path`.
        on_step, on_evaluation: called in this thread with the metrics of each, as the run writes them. An exception
            stops the run and is raised here.
        quiet: print nothing.
        settings: every other keyword is a setting, with two underscores for each dot.
    Returns:
        the run; `run.summary` is what it came to. Fields of the summary are also the run's own.
    Raises:
        ConfigError: a setting is unknown or impossible, or the reward or the data cannot be written; nothing was
            started.
        RunFailedError: the run failed; its last lines are on standard error, its logs in the run directory.
        KeyboardInterrupt: after Ctrl-C, once everything is stopped; the message says how to resume the run.
    """
    chosen = [] if experiment is None else [f"experiment={experiment}"]
    words = [*chosen, *overrides, *words_of(settings)]
    return _launch(words, Inputs(reward, data), on_step, on_evaluation, quiet)


def resume(
    run: Run | str | os.PathLike[str], overrides: Sequence[str] = (), *, on_step: Callback | None = None,
    on_evaluation: Callback | None = None, quiet: bool = False, **settings: Any,
) -> Run:
    """Go on with a stopped run from its newest good checkpoint, with the reward and the records that it was given.

    Args:
        run: the run, its directory, or its name in runs/.
        overrides, settings: replace those of the run, such as trainer__num_steps=400.
        on_step, on_evaluation, quiet: as in `train`.
    Returns:
        the whole run, its earlier part included.
    Raises:
        ControlError: there is no such run, it is running, or it has done all its steps. And what `train` raises.
    """
    found = find_run(str(run.directory if isinstance(run, Run) else run))
    verb, *words = command_of(found, [*overrides, *words_of(settings)])
    if verb != "launch":
        raise ControlError(f"{found.name} was started with streamrl {verb}, without actors of its own: take "
                           f"streamrl resume {found.path} in a terminal")
    return _launch(words, Inputs(None, None), on_step, on_evaluation, quiet)


def _launch(
    words: Sequence[str], inputs: Inputs, on_step: Callback | None, on_evaluation: Callback | None, quiet: bool,
) -> Run:
    with tempfile.TemporaryDirectory(prefix="streamrl-") as staging:
        caller = PythonCaller(inputs, Path(staging), on_step, on_evaluation, quiet)
        run_dir, code = launch_run(words, caller)
    caller.wants_more()  # what was written since it was last asked
    if caller.raised is not None:
        raise caller.raised
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"{caller.resume_words(name_or_path(run_dir))} continues this run")
    if code != 0:
        raise RunFailedError(f"The run ended with status {code}: see {run_dir / 'logs'}", code)
    run = load_run(run_dir)
    assert run.summary is not None, f"{run_dir} ended well and holds no summary.json"
    return replace(run, summary=replace(run.summary, extra={**run.summary.extra, "run_dir": str(run_dir)}))
