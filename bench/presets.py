"""Does every recipe in configs/algorithm run from end to end, and what does it score after twenty steps?

Each one is a launch of its own (a learner, two actors, the quickstart's tiny model) with nothing but `algorithm=NAME`
changed. A recipe passes if the launch exits with 0, does all its steps, trains nothing beyond the lag bound, skips no
step and reports finite losses. Twenty steps say that a recipe works, not which one is best.

Run: python -m bench.presets [NAME ...] [--steps 20] [--check]
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import configs
from bench.record import exit_status, record, shared_arguments

EVAL_SAMPLES = 50
TIME_LIMIT_S = 1800.0


def preset_names() -> list[str]:
    """Every file of the config group but that of distillation, the negative control too."""
    names = {path.stem for path in (Path(configs.__file__).parent / "algorithm").glob("*.yaml")}
    return sorted(names - {"distill"})  # it needs a teacher: bench.distill


def faults(code: int, num_steps: int, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Defects of a finished run; empty if there are none.

    Args:
        code: exit status of the launch.
        summary: summary.json, empty if there is none.
        rows: metrics.jsonl, one per step.
    """
    losses = [row["policy/loss"] for row in rows if "policy/loss" in row]
    found = {
        f"exit status {code}": code != 0,
        f"{summary.get('steps')} steps of {num_steps}": summary.get("steps") != num_steps,
        f"{summary.get('num_lag_violations')} lag violations": summary.get("num_lag_violations") != 0,
        f"{len(losses)} losses of {num_steps}": len(losses) < num_steps,
        "a loss is not finite": not all(math.isfinite(loss) for loss in losses),
        "values that are not finite": any(row.get("meter/num_nonfinite", 0) for row in rows),
        "skipped steps": any(row.get("policy/num_skipped_steps", 0) for row in rows),
    }
    return [what for what, happened in found.items() if happened]


def launch(name: str, num_steps: int, seed: int) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit status, summary and metrics of one run; a run that takes too long has status 124."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["experiment=quickstart", f"algorithm={name}", f"trainer.num_steps={num_steps}",
                 f"eval.num_samples={EVAL_SAMPLES}", f"run.seed={seed}", f"run.dir={run_dir}"]
        command = [sys.executable, "-m", "streamrl.cli", "launch", *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                _, errors = process.communicate(timeout=TIME_LIMIT_S)
                code = process.returncode
            except subprocess.TimeoutExpired:
                process.terminate()  # launch stops its learner and actors
                _, errors = process.communicate()
                code = 124
        if code:
            why = f"no end within {TIME_LIMIT_S:g} s; " if code == 124 else ""
            print(f"{name}: {why}{errors[-2000:]}", file=sys.stderr)
        return code, _json(run_dir / "summary.json"), _rows(run_dir / "metrics.jsonl")


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(name: str, num_steps: int, seed: int) -> dict[str, Any]:
    """One line: the number of faults, and what the run looked like."""
    code, summary, rows = launch(name, num_steps, seed)
    wrong = faults(code, num_steps, summary, rows)
    keys = ("eval_score_first", "eval_score_last", "wall_s", "lag_mean", "lag_max", "max_lag_bound", "trained_tokens")
    params = {"preset": name, "steps": num_steps, "eval_samples": EVAL_SAMPLES, "faults": wrong}
    params |= {key: summary.get(key) for key in keys}
    goal = {"id": "presets-run", "op": "<=", "value": 0}
    return record(
        f"presets.faults.{name}", float(len(wrong)), "faults", "lower", [float(len(wrong))], params, goal=goal,
        seed=seed,
    )


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="files of configs/algorithm; all if none is given")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    known = preset_names()
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"no such preset: {', '.join(unknown)}; there are {', '.join(known)}")
    names = arguments.names or (known[:1] if arguments.quick else known)
    lines = [measure(name, arguments.steps, arguments.seed) for name in names]
    for line in lines:
        seen = line["params"]
        print(
            f"{seen['preset']:16} eval {seen['eval_score_first']} -> {seen['eval_score_last']}   lag {seen['lag_mean']}"
            f"   {seen['wall_s']} s   {'; '.join(seen['faults']) or 'good'}", file=sys.stderr,
        )
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
