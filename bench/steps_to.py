"""How many more optimizer steps does a run need because its data is old? The quickstart at two leads, seed by seed.

Counted is the first evaluation (200 held-out prompts, greedy) at or above --score; both leads start from the same
warm-started model of their seed. Wall time is not looked at: bench.peers compares that.

Run: python -m bench.steps_to [--score 0.95] [--repeats 5] [--every 5] [--quick] [--late WORD ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.record import exit_status, record, shared_arguments
from streamrl.config.load import load_config
from streamrl.launch import Launcher
from streamrl.metrics.run_record import RunRecord, read_run

LEADS = (0, 2)
MOST_MORE = 1.1
"""Goal: steps at the larger lead over those at none."""


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--score", type=float, default=0.95)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations: the resolution")
    parser.add_argument("--steps", type=int, default=120, help="give up after so many")
    parser.add_argument("--late", nargs="+", default=[], metavar="WORD", help="settings of the runs at lead 2 alone")
    arguments = parser.parse_args()
    repeats, steps = (1, 2 * arguments.every) if arguments.quick else (arguments.repeats, arguments.steps)
    found: dict[int, list[int]] = {eta: [] for eta in LEADS}
    lags: dict[int, list[float]] = {eta: [] for eta in LEADS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed + 1, arguments.seed + 1 + repeats):
            for eta in LEADS:
                num, lag = steps_to(arguments.score, eta, seed, steps, arguments.every, Path(folder),
                                    arguments.late if eta else [])
                found[eta].append(num)
                lags[eta].append(lag)
                print(f"seed {seed} eta {eta}: {num} steps, mean lag {lag:.2f}", file=sys.stderr, flush=True)
    base = statistics.fmean(found[0])
    lines = [
        record(
            f"steps_to.quickstart.eta{eta}", statistics.fmean(found[eta]), "steps", "lower", found[eta],
            {"score": arguments.score, "every": arguments.every, "most": steps, "mean_lag": lags[eta],
             "late": arguments.late if eta else [],
             "value": "mean over the seeds; a run that did not get there counts as `most`"},
            goal={"id": "R-steps", "op": "<=", "value": MOST_MORE * base} if eta else None, seed=arguments.seed,
        )
        for eta in LEADS
    ]
    return exit_status(lines, arguments.check)


def steps_to(
    score: float, eta: int, seed: int, steps: int, every: int, folder: Path, more: Sequence[str] = ()
) -> tuple[int, float]:
    """Version of the first evaluation with this score, and the mean lag of all trained tokens."""
    words = [f"run.seed={seed}", f"staleness.eta={eta}", f"policy.tiny.cache_dir={folder / 'models'}",
             *(["staleness.num_lookahead_groups=0"] if eta == 0 else []), *more]
    reached, done = run_until(score, words, folder / f"{eta}-{seed}", steps, every)
    return steps if reached is None else reached, done.summary.lag_mean if done.summary else 0.0


def run_until(
    score: float, words: Sequence[str], run_dir: Path, steps: int, every: int
) -> tuple[int | None, RunRecord]:
    """Version of the first evaluation of a quickstart with this score, None without one; and the run's record."""
    words = ["experiment=quickstart", f"run.dir={run_dir}", f"trainer.num_steps={steps}", f"eval.every_steps={every}",
             "checkpoint.every_steps=0", "checkpoint.export_hf=false", "run.num_threads=1", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        if code := Launcher(load_config(words), words, run_dir).run():
            raise RuntimeError(f"the run ended with status {code}: {' '.join(words)}")
    done = read_run(run_dir)
    reached = [int(row["eval/version"]) for row in done.rows if row.get("eval/score", 0.0) >= score]
    return min(reached, default=None), done


if __name__ == "__main__":
    sys.exit(main())
