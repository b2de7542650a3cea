"""streamrl what-if RUN --from N algorithm=vespo,m2po [key=value ...]: other settings on the identical stream."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from learner.control.staleness import ESS
from learner.loop.retrain import Retrained
from learner.replay.opened import OpenedRun, join_ranks, notifier, open_run
from streamrl.algorithms import SURROGATES
from streamrl.commands import parsed, parser_of, status_of
from streamrl.config.composition import CONFIGS
from streamrl.config.load import load_config, load_run_config
from streamrl.config.overrides import ALLOW, leaves, to_overrides
from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean
from streamrl.metrics.files import write_atomic
from streamrl.metrics.text import compact
from streamrl.report.what_if import ESS_FLOOR, PATIENCE, Fork, Point, text_table, what_if_page
from streamrl.run_dirs import find_run_dir
from streamrl.stream.history import History

OF_STREAM = ("staleness.", "filter.", "rollout.", "env.", "data.", "reward.", "learner.num_minibatches",
             "learner.num_epochs", "actors.", "hub.")
"""Settings that would have led to another stream, or to other numbers of versions: a fork has the run's."""
OWN = "the run's own settings"


def main() -> int:
    parser = parser_of(
        "what-if", "Train a run's recorded batches again under other settings, and its own as the reference.",
        find=find_run_dir, between=True,
        usage="streamrl what-if RUN [--from N] [--to N] [algorithm=NAME,NAME] [key=value ...]",
        epilog=f"A fork stops where its evidence ends: ESS below {ESS_FLOOR} for {PATIENCE} batches in a row against "
        "the recorded log-probs. Table on the terminal, charts in RUN/what_if.html.",
    )
    given = parsed(parser, words="settings of every fork but the reference")
    configs = arms(given.run, given.words)
    join_ranks(given.run, "learner.replay.what_if", [one for one in given.words if one.startswith(ALLOW)])
    History.read(given.run).trained(given.first, given.last)
    return what_if(given.run, configs, given.first, given.last)


def arms(run_dir: Path, words: Sequence[str]) -> dict[str, Config]:
    """The settings of every fork by its name, the reference first.

    Raises ConfigError: nothing is changed, or something that the recorded stream depends on.
    """
    allow = [word for word in words if word.startswith(ALLOW)]
    words = [word for word in words if word not in allow]
    for word in words:
        if word.lstrip("+~").startswith(OF_STREAM):
            raise ConfigError(
                f"{word} would have made a stream unlike the recorded one: a fork trains on the same groups in the "
                "same batches; leave it out, or launch a run with it"
            )
    names = [one for word in words if word.startswith("algorithm=") for one in word.partition("=")[2].split(",")]
    more = [word for word in words if not word.startswith("algorithm=")]
    if not names and not more:
        raise ConfigError("no setting is changed: give algorithm=NAME,NAME or others, such as policy.optimizer.lr=1e-6")
    path = run_dir / "config.yaml"
    made = {OWN: load_run_config(run_dir, allow)}  # what the run names is allowed, or none of it is read
    for name in names or [""]:
        label = " ".join([*([name] if name else []), *more])
        made[label] = load_config([*_of_algorithm(path, name), *more])
    return made


def _of_algorithm(path: Path, name: str) -> list[str]:
    """Words for the run's settings with another algorithm: one of configs/algorithm/, or a surrogate alone."""
    files = (CONFIGS / "algorithm").glob("*.yaml")
    presets = {file.stem: dict(leaves(yaml.safe_load(file.read_text()))) for file in files}
    if not name:
        return [str(path)]
    if name in presets:  # what the run's own algorithm may have set gives way to the defaults, then to the preset
        typed = [f"{key}=" for keys in presets.values() for key in keys if not key.startswith(OF_STREAM)]
        return [*to_overrides(str(path), yaml.safe_load(path.read_text()), typed), f"algorithm={name}"]
    if name in SURROGATES:
        typed = ["loss.surrogate=", "loss.anchor=", "loss.options=", "loss.dual_clip=", "loss.cap="]
        own = to_overrides(str(path), yaml.safe_load(path.read_text()), typed)
        return [*own, f"loss.surrogate={name}"]
    raise ConfigError(
        f"algorithm={name} is unknown:{did_you_mean(name, [*presets, *SURROGATES])} give one of "
        f"{', '.join(sorted(presets))}, or a surrogate: {', '.join(SURROGATES)}"
    )


def what_if(run_dir: Path, configs: dict[str, Config], first: int, last: int | None) -> int:
    """Train every fork, print the table, write the page; the exit status."""
    own = configs[OWN]
    run = open_run(run_dir, config=own, own=own, at_most=first)
    ranks = run.ranks
    notify = notifier(ranks)
    if run.version < first:
        notify(f"{run_dir}: training from version {run.version} to {first} as the run did")
    for one in run.train(upto=first, compare=False):
        notify(f"  version {one.version} of {first}")
    first, folder, forks = run.version, run_dir / ".what-if", []
    try:
        begin = run.save(folder)
        del run
        for name, config in configs.items():
            notify(f"{name}, from version {first} on")
            opened = open_run(run_dir, config=config, own=own, begin=begin, ranks=ranks)
            forks.append(fork := _fork(name, opened, last, notify))
            del opened  # before the next one's networks are made
            gc.collect()
            notify(f"  {fork.ended}" if fork.ended else f"  {len(fork.points)} batches")
    finally:
        ranks.barrier()
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if ranks.rank == 0:
        out = run_dir / "what_if.html"
        write_atomic(out, what_if_page(run_dir.resolve().name, first, forks))
        notify(f"\n{text_table(forks)}\n\nAll train on the same batches: no fork can be evaluated. Charts: {out}")
    return 0


def _fork(name: str, run: OpenedRun, last: int | None, notify: Callable[[str], None]) -> Fork:
    """Train to the end of the log, or of the evidence."""
    fork = Fork(name)
    num = len(run.batches(upto=last))
    for one in run.train(upto=last):
        point = _point(one)
        fork.points.append(point)
        fork.num_compared += len(one.versions)
        fork.num_equal += sum(not text for text in one.versions.values())
        notify(
            f"  batch {len(fork.points)} of {num}  version {one.version}  loss {compact(point.loss)}  "
            f"gradient norm {compact(point.grad_norm)}  ESS {compact(point.ess)}"
        )
        if name != OWN and fork.evidence_ends:  # what the run itself was trained on is its own evidence
            fork.ended = f"stops at version {one.version}, where its evidence ends (ESS below {ESS_FLOOR})"
            break
    return fork


def _point(one: Retrained) -> Point:
    assert one.trained is not None
    measured, result = one.trained.measured, one.trained.result
    ess, kept = measured.value(ESS), measured.value("ess/kept_fraction")
    return Point(
        one.logged.cut.version, measured.value("reward/trained"), measured.value("policy/loss"), result.grad_norm,
        measured.value("drift/k1"), measured.value("ratio/mean_token"),
        None if kept is None else (ess or 0.0) * kept,  # vetoes leave an ESS of few tokens, which may be near 1
    )


if __name__ == "__main__":
    sys.exit(status_of(main))
