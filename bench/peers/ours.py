"""One run of streamrl on the same inputs, through `streamrl launch`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.peers.cases import Case


def run(
    case: Case, folder: Path, model: str, seed: int, *, eta: int, run_dir: Path, words: tuple[str, ...] = ()
) -> dict[str, Any]:
    """{"seconds", "tokens", "samples"} as `trl_run.py` prints them. Raises RuntimeError with the log's end.

    The run is `eta` + 1 steps longer than what is returned: actors that have nothing left to generate would leave their
    cores to the last steps.
    """
    synchronous = ["staleness.num_lookahead_groups=0"] if eta == 0 else []
    command = [
        sys.executable, "-m", "streamrl.cli", "launch", f"run.dir={run_dir}", f"run.seed={seed}", "run.num_threads=1",
        f"policy.model_path={model}", f"policy.optimizer.lr={case.learning_rate}", "policy.optimizer.max_grad_norm=1.0",
        f"data.path={folder / 'train.jsonl'}", f"env.path={folder / 'reward.py'}", "data.apply_chat_template=false",
        "data.test_ratio=0", f"trainer.num_steps={case.num_steps + eta + 1}",
        f"rollout.num_prompts_per_step={case.num_groups}", f"rollout.num_responses_per_prompt={case.group_size}",
        f"rollout.max_prompt_tokens={case.max_prompt_tokens}",
        f"rollout.train.sampling.max_new_tokens={case.max_new_tokens}",
        f"staleness.eta={eta}", *synchronous, "filter.zero_std=false", "eval.every_steps=0", "eval.num_samples=0",
        "checkpoint.every_steps=0", "checkpoint.export_hf=false",
        # A whole step at once, as the peer generates it.
        f"actors.num_concurrent={max(64, case.num_groups * case.group_size)}", *case.words, *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/num_tokens" in row][: case.num_steps]
    times = [row["run/wall_s"] for row in steps]
    return {
        "seconds": [end - start for start, end in zip([0.0, *times], times, strict=False)],
        "tokens": [row["policy/num_tokens"] for row in steps],
        "samples": case.num_groups * case.group_size,
    }
