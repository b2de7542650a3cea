"""On-policy distillation beside RL alone: optimizer steps until a tiny student reverses strings.

The teacher is the quickstart's trained model. Each student starts as the quickstart does, from random weights after
--warm supervised steps at most, and is trained twice: by algorithm=distill and by the quickstart's own algorithm, with
all other settings alike. Counted is the first evaluation (200 held-out prompts, greedy) at or above --score.

Run: python -m bench.distill [--warm 300] [--score 0.9] [--repeats 3] [--every 5] [--steps 100] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench.record import exit_status, record, shared_arguments
from bench.steps_to import run_until


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(repeats=3)
    parser.add_argument("--score", type=float, default=0.9)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations: the resolution")
    parser.add_argument("--steps", type=int, default=100, help="give up after so many")
    parser.add_argument("--lr", type=float, default=3e-4, help="of both students")
    parser.add_argument("--warm", type=int, default=300, help="supervised steps of the students; 0 is random weights")
    arguments = parser.parse_args()
    repeats, steps = (1, 2 * arguments.every) if arguments.quick else (arguments.repeats, arguments.steps)
    found: dict[str, list[int]] = {"distill": [], "rl": []}
    scores: dict[str, list[list[float]]] = {"distill": [], "rl": []}
    with tempfile.TemporaryDirectory() as folder:
        models = f"policy.tiny.cache_dir={folder}/models"
        _, done = run_until(1.0, [models, "checkpoint.export_hf=true"], Path(folder) / "teacher", 200, 200)
        teacher = [row["eval/score"] for row in done.rows if "eval/score" in row][-1]
        ways = {"distill": ["algorithm=distill", f"distill.teacher={folder}/teacher/model"], "rl": []}
        for seed in range(arguments.seed + 1, arguments.seed + 1 + repeats):
            student = [models, f"run.seed={seed}", f"policy.tiny.num_warm_start_steps={arguments.warm}",
                       f"policy.optimizer.lr={arguments.lr}"]
            for way, words in ways.items():
                reached, run = run_until(
                    arguments.score, [*student, *words], Path(folder) / f"{way}-{seed}", steps, arguments.every
                )
                found[way].append(steps if reached is None else reached)
                scores[way].append([row["eval/score"] for row in run.rows if "eval/score" in row])
                last = scores[way][-1][-1]
                print(f"seed {seed} {way}: {reached} steps, last {last:.3f}", file=sys.stderr, flush=True)
    lines = [
        record(
            f"distill.quickstart.{way}", statistics.fmean(found[way]), "steps", "lower", found[way],
            {"score": arguments.score, "every": arguments.every, "most": steps, "lr": arguments.lr,
             "warm": arguments.warm, "teacher": teacher, "evaluations": scores[way],
             "value": "mean over the seeds; a run that did not get there counts as `most`"},
            goal={"id": "R-distill", "op": "<=", "value": min(found["rl"])} if way == "distill" else None,
            seed=arguments.seed,
        )
        for way in found
    ]
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
