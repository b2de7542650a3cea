"""`streamrl launch -m`: checks the words of a sweep, does its runs, ranks them; Ctrl-C names the command to go on."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from streamrl.config.load import composed_yaml, load_config, load_partial
from streamrl.config.overrides import read_files
from streamrl.config.schema import Config, Pruner, SweepConfig, SweepDirection
from streamrl.config.schema_system import SweepLauncher
from streamrl.errors import ConfigError, in_one_line
from streamrl.gpus import visible_gpus
from streamrl.launch import EXIT_INTERRUPTED, Interrupts
from streamrl.metrics.files import read_object, write_atomic
from streamrl.metrics.ranking import Objective, Outcome, outcome
from streamrl.metrics.run_record import RunRecord, is_run, overrides_of, read_run
from streamrl.processes import num_cores
from streamrl.report.compare import write_comparison
from streamrl.report.index import write_pages
from streamrl.run_dirs import SWEEP_LOCK, sweep_lock
from streamrl.sweep.cluster import Cluster
from streamrl.sweep.job import NUM, SUBDIR, is_done, make_job, number_in, numbered
from streamrl.sweep.pool import Grid, Pool, Source
from streamrl.sweep.study import GRID, Search, check_search
from streamrl.sweep.words import SweepWords, parse_sweep

AROUND = {
    "launch", "hub", "actors", "publish", "tracking", "samples", "checkpoint", "stream", "run", "sweep", "search",
    "hydra", "learner.max_tokens_per_device", "learner.max_inference_tokens_per_device",
}
"""Sections and settings that may change while a sweep goes on: the results of its runs do not depend on them."""


def launch_sweep(typed: Sequence[str]) -> int:
    """Do the sweep of these words; returns 0 if every run finished or was pruned, 1 if not, 130 after Ctrl-C.

    Raises:
        ConfigError: the sweep is impossible, or every run of it; nothing was started.
    """
    words = parse_sweep(read_files(typed, multirun=True))
    config = _config_of_one(words)
    objective = Objective(config.sweep.metric, config.sweep.direction == SweepDirection.maximize)
    is_grid = config.sweep.sampler == GRID
    combinations = words.grid(config.sweep.num_grid_points) if is_grid else []
    cluster = _cluster_of(config)
    config.sweep.num_parallel = num_at_once(config.sweep, len(combinations))
    _check(config, objective, words)
    directory = _choose_directory(config)
    with sweep_lock(directory):
        _check_same_settings(directory, typed, words)
        return _do(directory, config, typed, words, combinations, objective, cluster)


def _do(
    directory: Path, config: Config, typed: Sequence[str], words: SweepWords, combinations: Sequence[tuple[str, ...]],
    objective: Objective, cluster: Cluster | None,
) -> int:
    """Do the runs of a sweep that is possible; returns its status."""
    print(f"sweep directory: {directory}", flush=True)
    is_grid = config.sweep.sampler == GRID
    on_slurm = config.sweep.launcher is SweepLauncher.submitit_slurm
    places = [{}] * config.sweep.num_parallel if on_slurm else shares(
        config.sweep.num_parallel, num_cores(), visible_gpus(os.environ), os.environ
    )
    if len(places) > 1 and not on_slurm:
        print(f"{describe(places)}; the output of each is in its logs/launch.log", flush=True)
    source: Source = (
        Grid(_numbers(directory, combinations, config.sweep.subdir)) if is_grid else
        Search(directory, words.axes, config.sweep, config.run.seed)
    )
    job_of = partial(make_job, directory, words.fixed, config.sweep.subdir)
    with Interrupts() as interrupts:
        tell = partial(_write_results, directory, objective, typed, config.sweep.subdir)
        start = None if cluster is None else cluster.start
        Pool(source, job_of, objective, places, lambda: interrupts.count, tell, start).run()
    records = _write_ranking(directory, objective, typed, config.sweep.subdir)
    write_pages(directory, Path(config.run.root) if config.sweep.dir is None else None, ended_well=True)
    if interrupts.count:
        print(f"\nStopped. Resume the sweep with:\n  {resume_command(typed, directory)}", flush=True)
        return EXIT_INTERRUPTED
    return int(not all(outcome(record) in (Outcome.finished, Outcome.pruned) for record in records))


def jobs_yaml(typed: Sequence[str], *, resolves: bool) -> str:
    """The settings of every job of a grid as YAML, a document each, as `streamrl launch` gets them.

    Raises ConfigError: a search, which draws what varies while it runs.
    """
    words = parse_sweep(read_files(typed, multirun=True))
    sweep = _config_of_one(words, load_partial).sweep
    if sweep.sampler != GRID:
        raise ConfigError(
            f"sweep.sampler={sweep.sampler} draws values while it runs, and --cfg job shows what is known before: "
            f"leave out -m and the sweeper, and give {', '.join(words.axes) or 'each setting'} one value"
        )
    documents = []
    for number, swept in enumerate(words.grid(sweep.num_grid_points)):
        job = make_job(Path(), words.fixed, sweep.subdir, number, swept)
        try:
            shown = composed_yaml(job.words, resolves=resolves)
        except ConfigError as error:  # its run fails, and the others go on
            shown = f"# refused: {in_one_line(error)}\n"
        documents.append(f"# job {number}: {job.label}\n{shown}")
    return "---\n".join(documents)


def num_at_once(settings: SweepConfig, num_combinations: int) -> int:
    """Runs at once, also where no setting gives their number."""
    of_slurm = num_combinations or settings.num_startup_trials
    return settings.num_parallel or (settings.launcher is SweepLauncher.submitit_slurm and of_slurm) or 1


def shares(num_jobs: int, cores: int, gpus: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Environment variables for each of the places in which jobs run; nothing is limited for one job alone.

    GPUs are dealt in turn: with fewer GPUs than jobs several jobs get the same one.
    """
    if num_jobs == 1:
        return [{}]
    threads = max(1, cores // num_jobs)
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        threads = min(threads, int(given))
    return [
        {"OMP_NUM_THREADS": str(threads), **_visible(place, num_jobs, gpus)} for place in range(num_jobs)
    ]


def _visible(place: int, num_jobs: int, gpus: Sequence[str]) -> dict[str, str]:
    if not gpus:
        return {}
    own = gpus[place::num_jobs] or [gpus[place % len(gpus)]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def describe(places: Sequence[Mapping[str, str]]) -> str:
    """Describe for the terminal what jobs that run at once get."""
    threads = f"{len(places)} runs at once with OMP_NUM_THREADS={places[0]['OMP_NUM_THREADS']} each"
    gpus = [place["CUDA_VISIBLE_DEVICES"] for place in places if "CUDA_VISIBLE_DEVICES" in place]
    return f"{threads}, on GPUs {' / '.join(gpus)}" if gpus else threads


def resume_command(typed: Sequence[str], directory: Path) -> str:
    """The command that goes on with a sweep in its directory."""
    mine = ("sweep.dir=", "checkpoint.resume=")
    kept = [word for word in typed if not word.startswith(mine)]
    return "streamrl launch -m " + shlex.join([*kept, f"sweep.dir={directory}", "checkpoint.resume=true"])


def _config_of_one(words: SweepWords, load: Callable[[Sequence[str]], Config] = load_config) -> Config:
    """The settings of the first combination that is possible: one that is not is a failed run, and no more."""
    refused: ConfigError | None = None
    for swept in words.examples():
        try:
            return load([*numbered(words.fixed, 0), *swept])
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _cluster_of(config: Config) -> Cluster | None:
    """The cluster that executes the runs; None for children of this process. Raises ConfigError: it cannot."""
    if config.sweep.launcher is SweepLauncher.local and not config.sweep.launcher_options:
        return None
    return Cluster(config.sweep, config.run.name)


def _check(config: Config, objective: Objective, words: SweepWords) -> None:
    sweep = config.sweep
    check_search(sweep)
    if sweep.sampler != GRID and not words.axes:
        raise ConfigError(
            f"sweep.sampler={sweep.sampler} needs a setting to search: add one, e.g. "
            "'policy.optimizer.lr=tag(log,interval(1e-5,1e-3))' or staleness.eta=0,2,4"
        )
    if sweep.sampler != GRID and sweep.pruner != Pruner.none and objective.series is None:
        raise ConfigError(
            f"sweep.metric={sweep.metric} has no value before the end of a run: add sweep.pruner=none, or rank by an "
            "evaluation or a metric of every step"
        )
    if swept := [key for key in words.axes if key.startswith("sweep.")]:
        raise ConfigError(f"{swept[0]} applies to the whole sweep: give it one value")
    if any(word.startswith("run.dir=") for word in words.fixed):
        raise ConfigError("run.dir names one directory, and each run of a sweep has its own: use sweep.dir=...")
    subdir = sweep.subdir or "{num}"
    if "/" in subdir or not ("{num}" in subdir or "{overrides}" in subdir):
        raise ConfigError(f"sweep.subdir={subdir} must name a different directory for each run, e.g. run-{{num}}")
    ports = {"hub.bind": config.hub.bind.rpartition(":")[2], "hub.weights_port": str(config.hub.weights_port)}
    fixed = [name for name, port in ports.items() if port != "0"]
    if sweep.num_parallel > 1 and fixed:
        raise ConfigError(
            f"{fixed[0]} fixes port {ports[fixed[0]]}, which the {sweep.num_parallel} runs of sweep.num_parallel "
            "cannot share: leave it out, or take port 0"
        )


def _choose_directory(config: Config) -> Path:
    resume = config.checkpoint.resume
    if config.sweep.dir is None:
        if resume:
            raise ConfigError("checkpoint.resume=true does not say which sweep to continue: add sweep.dir=...")
        directory = Path(config.run.root) / f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
    else:
        directory = Path(config.sweep.dir)
        if not resume and directory.is_dir() and any(one.name != SWEEP_LOCK for one in directory.iterdir()):
            raise ConfigError(
                f"sweep.dir={directory} already holds files: add checkpoint.resume=true to go on with its sweep, or "
                "choose another"
            )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _numbers(
    directory: Path, combinations: Sequence[tuple[str, ...]], subdir: str | None
) -> list[tuple[int, tuple[str, ...]]]:
    """The combinations with their numbers; one that has a directory, perhaps of a grid of other values, keeps its."""
    if NUM not in (subdir or SUBDIR):  # the words alone name a directory
        return list(enumerate(combinations))
    found: dict[tuple[str, ...], int] = {}
    for path in sorted(directory.iterdir()):
        number, words = number_in(path.name, subdir), tuple(overrides_of(path))
        if make_job(directory, (), subdir, number, words).run_dir == path:
            found.setdefault(words, number)
    free = (number for number in count() if number not in found.values())
    return [(found[words] if words in found else next(free), words) for words in combinations]


def _check_same_settings(directory: Path, typed: Sequence[str], words: SweepWords) -> None:
    """Raise ConfigError if runs are done that other settings than these decided: they would pass for their results."""
    done = [path for path in directory.iterdir() if path.is_dir() and is_done(path)]
    command = read_object(directory / "sweep.json").get("command")
    if not done or not isinstance(command, str):
        return
    try:
        then, now = _deciding(shlex.split(command)[3:]), _deciding(typed)
    except ValueError:  # a quote that is not closed: somebody has edited it
        return
    varied = {word.partition("=")[0] for path in done for word in overrides_of(path)} | words.axes.keys()
    for key in sorted((then.keys() | now.keys()) - varied):
        if then.get(key) != now.get(key):
            raise ConfigError(
                f"sweep.dir={directory} has {len(done)} runs that are done, with {then.get(key, f'no {key}')}, and "
                f"these words have {now.get(key, f'no {key}')}: give the same, or choose another directory"
            )


def _deciding(words: Sequence[str]) -> dict[str, str]:
    """The words by setting, without those on which no run's result depends."""
    found: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key == "run.seed" or not AROUND & {key, re.split("[./]", key)[0]}:
            found[key] = word
    return found


def _ranked(
    directory: Path, objective: Objective, subdir: str | None
) -> list[tuple[RunRecord, Path]]:
    """The runs so far and their directories, best first."""
    paths = sorted(directory.iterdir(), key=partial(_place, subdir))
    found = [path for path in paths if is_run(path)]
    records = [read_run(path) for path in found]
    order = objective.order(records)
    return [(records[i], found[i]) for i in order]


def _write_results(
    directory: Path, objective: Objective, typed: Sequence[str], subdir: str | None
) -> list[tuple[RunRecord, Path]]:
    """Write sweep.json, for programs, and the best run so far alone, in best.json; the runs, best first."""
    ranked = _ranked(directory, objective, subdir)
    if not ranked:
        return []
    rows = [_row(record, objective) for record, _ in ranked]
    done = {
        _place(subdir, path): objective.value(record)
        for record, path in ranked
        if outcome(record) == Outcome.finished
    }
    values = [
        value for _, value in sorted(done.items())
        if value is not None
    ]
    report = {
        "command": "streamrl launch -m " + shlex.join(typed),
        "metric": objective.metric,
        "direction": "maximize" if objective.maximize else "minimize",
        "statistics": _statistics(values, objective),
        "runs": rows,
    }
    write_atomic(directory / "sweep.json", json.dumps(report, indent=2) + "\n")
    if values:
        write_atomic(directory / "best.json", json.dumps(rows[0], indent=2) + "\n")
    return ranked


def _statistics(values: Sequence[float], objective: Objective) -> dict[str, Any]:
    """Statistics of the values of finished runs, in the order of their numbers; nothing without any."""
    if not values:
        return {}
    better = max if objective.maximize else min
    return {
        "finished": len(values),
        "mean": fmean(values),
        "std": pstdev(values),
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "best_so_far": list(accumulate(values, better)),
    }


def _write_ranking(
    directory: Path, objective: Objective, typed: Sequence[str], subdir: str | None
) -> list[RunRecord]:
    """The table on the terminal, comparison.html and comparison.md, and the files of `_write_results`."""
    ranked = _write_results(directory, objective, typed, subdir)
    if not ranked:
        return []
    page = directory / "comparison.html"
    found = sorted((path for _, path in ranked), key=partial(_place, subdir))
    print("\n" + write_comparison(found, page, objective))
    print(f"comparison      {page}", flush=True)
    if outcome(best := ranked[0][0]) == Outcome.finished:
        value = objective.value(best)
        print(f"best            {objective.metric} {value}: {' '.join(best.overrides)}", flush=True)
    for record, path in ranked:
        if outcome(record) in (Outcome.unfinished, Outcome.failed):
            print(f"not finished    {path}{': ' if record.failure else ''}{record.failure}", file=sys.stderr)
    return [record for record, _ in ranked]


def _place(subdir: str | None, path: Path) -> tuple[int, str]:
    """The number of the job whose directory this is, and the name: it may hold no number."""
    return number_in(path.name, subdir), path.name


def _row(record: RunRecord, objective: Objective) -> dict[str, Any]:
    summary = record.summary
    return {
        "run": record.name, "settings": record.overrides, "outcome": outcome(record).name,
        "value": objective.value(record), "steps": summary.steps if summary else None,
        "wall_s": round(summary.wall_s, 1) if summary else None, "failure": record.failure or None,
    }
