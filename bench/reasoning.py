"""Does one recipe with the same settings teach a real pretrained model several tasks of reasoning_gym?

SmolLM2-135M-Instruct (`make smollm2` converts its weights) and `experiment=smollm2` with nothing changed but the task,
half of its prompts a step, and fewer steps. The score is that of the held-out prompts, answered greedily; the value of
a task is the mean over the seeds after the last step.

Run: python -m bench.reasoning [--tasks gcd products] [--steps 30] [--repeats 3] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench.record import exit_status, record, shared_arguments
from streamrl.config.load import load_config
from streamrl.launch import Launcher
from streamrl.metrics.run_record import read_run

TASKS = {
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "instruction": "Answer:"},
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1, "instruction": ""},
    "gcd": {"min_value": 2, "max_value": 30, "instruction": "Answer:"},
    "products": {"min_digits": 1, "max_digits": 2, "instruction": "Answer:"},
}
"""Datasets of the package with options that leave a model of this size something to reach."""
FORM = ("data.apply_chat_template=false", "rollout.train.sampling.max_new_tokens=8",
        'rollout.train.sampling.stop=["\n"]')
"""The form of the experiment's answers, which another task does not take over."""
NUM_EVAL, NUM_CURVE = 100, 3
"""Held-out prompts, and evaluations after the first."""


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(repeats=3)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    repeats, steps = (1, NUM_CURVE) if arguments.quick else (arguments.repeats, arguments.steps)
    lines = []
    for task in arguments.tasks:
        curves = []
        for seed in range(arguments.seed + 1, arguments.seed + 1 + repeats):
            curves.append(curve(task, steps, seed))
            print(f"{task}, seed {seed}: {curves[-1]}", file=sys.stderr, flush=True)
        ends = [scores[-1] for _, scores in curves]
        params = {"words": words(task, steps), "value": "mean over the seeds",
                  "versions": curves[0][0], "scores": [scores for _, scores in curves]}
        lines.append(record(f"reasoning.score.{task}", statistics.fmean(ends), "score", "higher", ends, params,
                            seed=arguments.seed))
    return exit_status(lines, arguments.check)


def words(task: str, steps: int) -> list[str]:
    """The words of a run: the experiment, and what is changed of it."""
    return [
        "experiment=smollm2", f"env.name=reasoning_gym.{task}",
        *(f"env.options.{name}={json.dumps(value)}" for name, value in TASKS[task].items()),
        f"trainer.num_steps={steps}", f"eval.every_steps={max(1, steps // NUM_CURVE)}", f"eval.num_samples={NUM_EVAL}",
        *FORM, "rollout.num_prompts_per_step=4", "checkpoint.every_steps=0", "checkpoint.export_hf=false",
    ]


def curve(task: str, steps: int, seed: int) -> tuple[list[int], list[float]]:
    """Weight versions that were evaluated, the first before any step, and their scores."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run_dir = Path(folder) / "run"
        given = [*words(task, steps), f"run.dir={run_dir}", f"run.seed={seed}"]
        if code := Launcher(load_config(given), given, run_dir).run():
            raise RuntimeError(f"the run ended with status {code}: {' '.join(given)}")
        rows = [row for row in read_run(run_dir).rows if "eval/score" in row]
    return [int(row["eval/version"]) for row in rows], [round(row["eval/score"], 4) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
