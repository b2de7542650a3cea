"""Savings of LoRA: bytes of a version, optimizer memory, and steps per second, beside full training.

Two launches of experiment=smollm2 in turn, `--repeats` times, with nothing but `policy.lora.rank` changed. Bytes of a
version are `throughput/published_bytes`; optimizer memory is the moments in the last checkpoint; steps per second are
those of the median step, waiting included, so both processes and both cores count.

Run: python -m bench.lora [--engine vllm] [--rank 16] [--steps 6] [key=value ...]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from bench.record import exit_status, record, shared_arguments

MOST_PUBLISHED = 0.03
"""Of the bytes of full training."""


class Measured(NamedTuple):
    """One run."""

    published_bytes: float
    optimizer_bytes: float
    checkpoint_bytes: float
    steps_per_s: float
    publish_s: float


def launch(words: Sequence[str]) -> Measured:
    """One run of experiment=smollm2 with these words over it. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "streamrl.cli", "launch", "experiment=smollm2", f"run.dir={run_dir}", *words]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        checkpoint = max(run_dir.glob("ckpt-*"))
        return Measured(
            published_bytes=_last(rows, "throughput/published_bytes"), optimizer_bytes=_optimizer_bytes(checkpoint),
            checkpoint_bytes=float(sum(path.stat().st_size for path in checkpoint.glob("rank-*"))),
            steps_per_s=1.0 / statistics.median(row["time/step_s"] for row in rows if "time/step_s" in row),
            publish_s=statistics.median(row["time/publish_s"] for row in rows if "time/publish_s" in row),
        )


def _last(rows: Sequence[dict[str, Any]], key: str) -> float:
    return next(float(row[key]) for row in reversed(rows) if key in row)


def _optimizer_bytes(checkpoint: Path) -> float:
    found = 0
    for path in checkpoint.glob("rank-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found += sum(file.get_tensor(key).nbytes for key in file.keys() if key.startswith("optim/"))  # noqa: SIM118
    return float(found)


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--engine", default="native", choices=("native", "vllm"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("words", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    shared = [f"actors.engine={arguments.engine}", f"trainer.num_steps={2 if arguments.quick else arguments.steps}",
              "eval.num_samples=0", "checkpoint.every_steps=0", "checkpoint.export_hf=false", *arguments.words]
    full, lora = [], []
    for _ in range(1 if arguments.quick else arguments.repeats):
        full.append(launch(shared))
        lora.append(launch([*shared, f"policy.lora.rank={arguments.rank}"]))
    lines = []
    for field, unit, better in (
        ("published_bytes", "bytes", "lower"), ("optimizer_bytes", "bytes", "lower"),
        ("checkpoint_bytes", "bytes", "lower"), ("steps_per_s", "steps/s", "higher"), ("publish_s", "s", "lower"),
    ):
        mine, theirs = ([getattr(one, field) for one in runs] for runs in (lora, full))
        middle = statistics.median(theirs)
        goal = {"id": "lora-bytes", "op": "<=", "value": MOST_PUBLISHED * middle}
        baseline = {"name": f"lora.{field}.full", "value": middle, "unit": unit, "source": "the same launch with "
                    "policy.lora.rank=null, in turn", "version": "", "measured_here": True}
        params = {"engine": arguments.engine, "rank": arguments.rank, "words": shared, "full": theirs}
        lines.append(record(
            f"lora.{field}.{arguments.engine}", statistics.median(mine), unit, better, mine, params, baseline,
            goal if field == "published_bytes" else None, seed=arguments.seed,
        ))
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
