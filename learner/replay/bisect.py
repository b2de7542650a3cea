"""streamrl bisect RUN: the version at which a score broke, in log2(n) evaluations of models made by training again."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner.replay.opened import OpenedRun, open_run
from learner.setup.trainer import save_policy
from streamrl.commands import parsed, parser_of, status_of
from streamrl.config.load import load_config
from streamrl.errors import ControlError
from streamrl.parent_watch import program
from streamrl.run_dirs import find_run_dir
from streamrl.stream.history import History

FOUND, NOTHING_BROKE = 0, 1
"""Exit statuses."""
MAX_BYTES = 20 << 30
"""Models that are on the disk at a time; with more versions in question, some of them are looked at first."""


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
    tell: Callable[[str], None] = lambda text: None
    max_bytes: int = MAX_BYTES
    scores: dict[int, float] = field(default_factory=dict)
    limit: float = 0.0

    def between(self, good: int, bad: int) -> int | None:
        """The first bad version; None if `bad` is not bad. One model scored more than log2 where `bad` is the first."""
        last = bad
        run = open_run(self.run_dir, self.words, at_most=good)
        good = self._train(run, good)
        self._save(run, good)
        self.limit = self._score(good) - self.drop
        while versions := self._kept(run, good, bad):
            for version in versions:
                self._train(run, version)
                self._save(run, version)
            while versions:
                middle = versions[(len(versions) - 1) // 2]
                if self._score(middle) < self.limit:
                    bad, versions = middle, [one for one in versions if one < middle]
                else:
                    good, versions = middle, [one for one in versions if one > middle]
            shutil.rmtree(self.folder)
            if self._versions(run, good, bad):  # which were passed over
                run = open_run(self.run_dir, self.words, at_most=good)
                self._train(run, good)
        if bad == last:
            self._train(run, bad)
            self._save(run, bad)
            if not self._score(bad) < self.limit:
                return None
        return bad

    def _versions(self, run: OpenedRun, good: int, bad: int) -> list[int]:
        return sorted({one.cut.version for one in run.history.batches if one.trained and good < one.cut.version < bad})

    def _kept(self, run: OpenedRun, good: int, bad: int) -> list[int]:
        """The versions in between whose models are made: all of them, or as many as the disk is allowed to hold."""
        between = self._versions(run, good, bad)
        parameters = run.trainer.networks.policy.parameters()
        nbytes = sum(one.numel() * run.trainer.settings.wire_dtype.itemsize for one in parameters)
        stride = max(1, -(-len(between) * nbytes // self.max_bytes))
        return between[stride - 1 :: stride] or between[:1]

    def _train(self, run: OpenedRun, version: int) -> int:
        for one in run.train(upto=version, compare=False):
            self.tell(f"  trained up to version {one.version}")
        return run.version

    def _save(self, run: OpenedRun, version: int) -> None:
        save_policy(run.config, run.trainer, run.model_dir, self._model(version))

    def _model(self, version: int) -> Path:
        return self.folder / f"version-{version}"

    def _score(self, version: int) -> float:
        """The score of a version; its model is not needed after that."""
        found = self.scores[version] = self.score(self._model(version))
        shutil.rmtree(self._model(version))
        said = "" if len(self.scores) == 1 else "  bad" if found < self.limit else "  good"
        print(f"version {version:6d}  score {found:.4f}{said}", flush=True)
        return found


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
    dataset = given.eval if given.eval in load_config([str(given.run / "config.yaml"), *words]).eval.datasets else ""
    task = [] if given.eval == dataset else [
        f"env.name={given.eval}", "env.path=null", "env.options={}", "data.path=null", "reward.type=null"
    ]

    def score(model: Path) -> float:
        return evaluated(model, [str((given.run / "config.yaml").resolve()), *words, *task], dataset)

    search = Search(
        given.run, given.words, score, given.drop, folder, lambda text: print(text, file=sys.stderr, flush=True)
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
        raise ControlError(f"the log of {run_dir} holds no trained batch, there is nothing to search: give another run")
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
