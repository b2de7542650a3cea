"""streamrl bisect RUN: the version at which a score broke, in log2(n) evaluations of models made by training again."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from learner.replay.opened import OpenedRun, open_run
from learner.setup.trainer import save_policy
from streamrl.commands import parsed, parser_of, say, status_of
from streamrl.config.load import load_run_config
from streamrl.errors import ControlError
from streamrl.parent_watch import program
from streamrl.run_dirs import find_run_dir
from streamrl.stream.history import History

FOUND, NOTHING_BROKE = 0, 1
"""Exit statuses."""


@dataclass
class Search:
    """A binary search for the first version whose score is below that of a good one by more than `drop`.

    Attributes:
        score: of the model in a folder.
        scores: by version, of those that were evaluated.
    """

    run_dir: Path
    words: Sequence[str]
    score: Callable[[Path], float]
    drop: float
    folder: Path
    notify: Callable[[str], None] = lambda text: None
    scores: dict[int, float] = field(default_factory=dict)
    limit: float = 0.0

    def between(self, good: int, bad: int) -> int | None:
        """The first bad version; None if `bad` is not bad. One model scored more than log2 where `bad` is the first."""
        last, run = bad, open_run(self.run_dir, self.words, at_most=good)
        good = self._train(run, good)
        begin = run.save(self.folder)
        self.limit = self._score(run) - self.drop
        while versions := _between(run, good, bad):
            middle = self._train(run, versions[(len(versions) - 1) // 2])
            if self._score(run) < self.limit:
                bad = middle
                del run  # before the next one's networks are made
                gc.collect()
                run = open_run(self.run_dir, self.words, begin=begin)
            else:
                good, begin = middle, run.save(self.folder)
        if bad == last:
            self._train(run, bad)
            if not self._score(run) < self.limit:
                return None
        return bad

    def _train(self, run: OpenedRun, version: int) -> int:
        for one in run.train(upto=version, compare=False):
            self.notify(f"  trained up to version {one.version}")
        return run.version

    def _score(self, run: OpenedRun) -> float:
        """The score of the run's present version; its model is not needed after that."""
        version, model = run.version, self.folder / f"version-{run.version}"
        save_policy(run.config, run.trainer, run.model_dir, model)
        found = self.scores[version] = self.score(model)
        shutil.rmtree(model)
        said = "" if len(self.scores) == 1 else "  bad" if found < self.limit else "  good"
        print(f"version {version:6d}  score {found:.4f}{said}", flush=True)
        return found


def _between(run: OpenedRun, good: int, bad: int) -> list[int]:
    return sorted({one.cut.version for one in run.history.batches if one.trained and good < one.cut.version < bad})


def main() -> int:
    parser = parser_of(
        "bisect", "Find the version at which a score broke: the run's log is trained again, and its versions are "
        "scored in a binary search.", find=find_run_dir,
        epilog="Exit status: 0 found, 1 the last version is not bad, 2 an error. Then: streamrl blame RUN A..B",
    )
    parser.add_argument("--eval", default="", metavar="NAME", help="a task, or one of the run's eval.datasets; by "
                        "default the run's own held-out prompts")
    parser.add_argument("--good", type=int, default=0, metavar="N", help="a version known to be good (default: 0)")
    parser.add_argument("--bad", type=int, default=None, metavar="N", help="one known to be bad (default: the last)")
    parser.add_argument("--drop", type=float, default=0.1, metavar="X", help="bad is a score lower by more than this "
                        "than that of the good version (default: 0.1)")
    parser.add_argument("--num-prompts", type=int, default=None, metavar="N", help="default: as the run's settings say")
    given = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="streamrl-bisect-") as folder:
        return bisect(given, Path(folder))


def bisect(given: argparse.Namespace, folder: Path) -> int:
    """Search and print what was found; the exit status."""
    words = [*given.words]
    if given.num_prompts is not None:
        words.append(f"eval.num_samples={given.num_prompts}")
    dataset = given.eval if given.eval in load_run_config(given.run, words).eval.datasets else ""
    task = [] if given.eval == dataset else [
        f"env.name={given.eval}", "env.path=null", "env.options={}", "data.path=null", "reward.type=null"
    ]

    def score(model: Path) -> float:
        return evaluated(model, [str((given.run / "config.yaml").resolve()), *words, *task], dataset)

    search = Search(
        given.run, given.words, score, given.drop, folder, partial(say, error=True)
    )
    bad = last_version(given.run) if given.bad is None else given.bad
    if given.good >= bad:
        raise ControlError(f"--good {given.good} is not before --bad {bad}: give two versions with batches in between")
    found = search.between(given.good, bad)
    if found is None:
        print(f"version {bad} is not bad: its score is at least {search.limit:.4f} (--drop {given.drop:g})")
        return NOTHING_BROKE
    before = max((version for version in search.scores if version < found), default=given.good)
    print(f"version {found} is the first bad one, after {len(search.scores)} evaluations")
    print(f"what led to it: streamrl blame {given.run} {before}..{found}")
    return FOUND


def last_version(run_dir: Path) -> int:
    """The last version that the log leads to. Raises ControlError: there is none."""
    ended = [one.step.version for one in History.read(run_dir).batches if one.step is not None]
    if not ended:
        raise ControlError(f"the log of {run_dir} holds no trained batch and nothing to search: give another run")
    return ended[-1]


def evaluated(model: Path, words: Sequence[str], dataset: str) -> float:
    """The score of a model by `streamrl eval`, in a process of its own. Raises ControlError: it failed."""
    with tempfile.TemporaryDirectory(prefix="streamrl-eval-") as folder:
        done = subprocess.run(
            [*program("actors.evaluate"), str(model), *words], cwd=folder, capture_output=True, text=True, check=False
        )
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("evals/*.json"))]
    scores = [next(iter(one["estimates"].values()))[0] for one in results if one["set"] == dataset]
    if not scores:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ControlError(f"streamrl eval of {model.name} gave no score: {lines[-1]}")
    return float(scores[0])


if __name__ == "__main__":
    sys.exit(status_of(main))
