"""Is a run with one answer a prompt as fast as one with groups of eight, for the same number of answers?

The same number of answers per step and the same loss, in turns: the quickstart with 16 prompts x 8 answers and 128
prompts x 1, SmolLM2-135M on its sums with 8 x 8 and 64 x 1 (`make smollm2` converts its weights), and both models on
answers that are longer than their prompts: `repeats` (102 letters) and `smollm2_long` (64 tokens, whatever they say).
The value is the ratio of answers trained per second, from the first step after a fifth of the run to the last.

The learner computes a group's prompt once for all its answers, which answers to different prompts cannot have. So
groups of eight run also without that (`learner.share_prompts=false`), unless --shared-only is given.

Run: python -m bench.group_size [--experiment quickstart] [--shared-only] [--steps 60] [--repeats 5] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from pathlib import Path

from bench.record import exit_status, record, shared_arguments
from streamrl.config.load import load_config
from streamrl.launch import Launcher
from streamrl.metrics.run_record import read_run

LONG = ("rollout.train.sampling.max_new_tokens=64", "rollout.train.sampling.ignore_eos=true",
        "rollout.train.sampling.stop=[]")
EXPERIMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "quickstart": (128, ("experiment=quickstart",)), "smollm2": (64, ("experiment=smollm2",)),
    "repeats": (64, ("bench/staleness_real/repeats.yaml",)), "smollm2_long": (16, ("experiment=smollm2", *LONG)),
}
"""A step's answers, and the settings."""
ARMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "eight": (8, ()), "eight_unshared": (8, ("learner.share_prompts=false",)), "one": (1, ()),
}
"""Answers to a prompt, and further settings."""
GOAL = 0.9
WORDS = (
    "algorithm=single_rollout", "eval.num_samples=0", "checkpoint.every_steps=0",
    "checkpoint.export_hf=false", "run.num_threads=1", "launch.num_actors=1", "filter.zero_std=false",
)


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--experiment", choices=tuple(EXPERIMENTS), default="quickstart")
    parser.add_argument("--shared-only", action="store_true", help="without the arm eight_unshared")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    experiment = arguments.experiment
    repeats, steps = (1, 10) if arguments.quick else (arguments.repeats, arguments.steps)
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    if arguments.shared_only:
        del found["eight_unshared"]
    with tempfile.TemporaryDirectory() as folder:
        if not experiment.startswith("smollm2"):
            measured(experiment, "eight", 5, arguments.seed, Path(folder))  # makes the start model
        for _ in range(repeats):
            for arm in found:
                found[arm].append(measured(experiment, arm, steps, arguments.seed, Path(folder)))
                print(f"{arm}: {found[arm][-1]:.1f} answers/s", file=sys.stderr, flush=True)
    params = {"experiment": experiment, "steps": steps, "answers": EXPERIMENTS[experiment][0],
              "words": [*EXPERIMENTS[experiment][1], *WORDS],
              **{f"answers_per_s_{arm}": values for arm, values in found.items()}}
    lines = []
    for arm in (arm for arm in found if arm != "one"):
        ratios = [one / other for one, other in zip(found["one"], found[arm], strict=True)]
        goal = {"id": "G1", "op": ">=", "value": GOAL}
        lines.append(record(f"group_size.one_to_{arm}.{experiment}", statistics.median(ratios), "ratio", "higher",
                            ratios, params, seed=arguments.seed, goal=goal))
    return exit_status(lines, arguments.check)


def measured(experiment: str, arm: str, steps: int, seed: int, folder: Path) -> float:
    """Answers trained per second."""
    run_dir, (size, more), (answers, task) = Path(tempfile.mkdtemp(dir=folder)), ARMS[arm], EXPERIMENTS[experiment]
    words = [*task, *WORDS, f"run.dir={run_dir / 'run'}", f"run.seed={seed}",
             f"trainer.num_steps={steps}", f"policy.tiny.cache_dir={folder / 'models'}",
             f"rollout.num_responses_per_prompt={size}", f"rollout.num_prompts_per_step={answers // size}", *more]
    with contextlib.redirect_stdout(io.StringIO()):
        if code := Launcher(load_config(words), words, run_dir / "run").run():
            raise RuntimeError(f"the run ended with status {code}: {' '.join(words)}")
    rows = [row for row in read_run(run_dir / "run").rows if "policy/loss" in row][steps // 5 :]
    return statistics.harmonic_mean(row["throughput/trajectories_per_s"] for row in rows)  # of equal numbers of answers


if __name__ == "__main__":
    sys.exit(main())
