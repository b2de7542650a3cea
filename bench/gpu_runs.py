"""Whole launched runs on the GPU: their settings, and what their files say afterwards.

A dry run checks the settings in the learner's preflight, on the CPU and without what needs a GPU, and starts nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_shapes import DRY, free_device_memory, random_model
from learner.model.tiny import make_tiny_model
from streamrl.metrics.run_record import read_metrics

ROOT = Path(__file__).parent.parent
LIMIT_S = 240
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TOLD = "in one line"
PHASES = ("step", "wait", "pack", "score", "forward_backward", "optimizer", "publish")


@dataclass(frozen=True)
class LaunchedRun:
    """Numbers of a run: of `metrics.jsonl` the medians of each step but the first two, and its line for a README."""

    steps: int
    seconds_per_step: list[float]
    phases_ms: dict[str, float]
    rows: list[dict[str, object]]
    line: str


def quickstart_words(steps: int, transports: str) -> list[str]:
    """The quickstart on one shared GPU, in bfloat16, with probes."""
    return [
        "experiment=quickstart", f"trainer.num_steps={steps}", "eval.every_steps=0", "eval.num_samples=20",
        "checkpoint.export_hf=false", "publish.probe_every=5", "actors.engine=native", *_devices(transports),
    ]


def real_size_words(model: Path, steps: int) -> list[str]:
    """A model of real size with random weights: one learner rank and one native actor on one GPU."""
    return [
        f"env.path={ROOT / 'bench' / 'gpu_task.py'}", f"policy.model_path={model}", f"trainer.num_steps={steps}",
        "rollout.num_prompts_per_step=8", "rollout.num_responses_per_prompt=8", "rollout.max_prompt_tokens=256",
        "rollout.train.sampling.max_new_tokens=512", "rollout.train.sampling.ignore_eos=true",
        "learner.max_tokens_per_device=16384", "policy.gradient_checkpointing=true", "launch.num_actors=1",
        "eval.num_samples=8", "eval.every_steps=0", "checkpoint.every_steps=0", "checkpoint.export_hf=false",
        "rollout.test.sampling.max_new_tokens=64", "filter.zero_std=false", "actors.num_concurrent=192",
        "actors.engine=native", *_devices("shm,zmq"),
    ]


def one_gpu_words(model: Path, steps: int, *, sums: bool) -> list[str]:
    """`experiment=one_gpu` as a user types it; with random weights, which learn no sums, on the task of these runs."""
    words = ["experiment=one_gpu", f"policy.model_path={model}", f"trainer.num_steps={steps}"]
    if sums:
        return words
    return [
        *words, "env.options={}", f"env.path={ROOT / 'bench' / 'gpu_task.py'}", "filter.zero_std=false",
        "rollout.train.sampling.stop=[]", "rollout.train.sampling.max_new_tokens=256", "eval.num_samples=16",
        "eval.every_steps=0", "checkpoint.export_hf=false",
    ]


def _devices(transports: str) -> list[str]:
    if DRY:
        return ["run.device=cpu", "actors.device=cpu"]
    return [
        "run.device=cuda", "actors.device=cuda", "launch.share_gpus=true", f"publish.transports=[{transports}]",
        f"actors.transports=[{transports}]",
    ]


def make_model(folder: Path, shape: str) -> Path:
    """A checkpoint of this shape with random weights and a tokenizer of letters."""
    path = make_tiny_model(folder, characters=CHARACTERS, hidden_size=16, num_layers=1, num_heads=2)
    config = json.loads((path / "config.json").read_text())
    model = random_model(shape, eos_token_id=config["eos_token_id"], pad_token_id=config["pad_token_id"])
    for old in path.glob("*.safetensors"):
        old.unlink()
    model.save_pretrained(path)
    del model
    free_device_memory()
    return path


def launch(
    words: Sequence[str], folder: Path, log: Path, *, check_only: bool = bool(DRY)
) -> LaunchedRun | None:
    """Do the run; None if its settings were only checked. Raises RuntimeError with the end of its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    program = ["learner", "--check"] if check_only else ["streamrl.cli", "launch"]
    command = [sys.executable, "-P", "-m", *program, *words]
    if not check_only:
        command.append(f"run.dir={folder}")
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder.parent, timeout=LIMIT_S,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {log.read_text(errors='replace')[-3000:]}")
    if check_only:
        return None
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "time/step_s" in row]
    later = rows[2:] or rows
    phases = {name: 1000 * statistics.median(row[f"time/{name}_s"] for row in later) for name in PHASES}
    told = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(TOLD)]
    line = told[-1].removeprefix(TOLD).strip() if told else ""
    return LaunchedRun(len(rows), [row["time/step_s"] for row in later], phases, rows, line)


def keep_logs(folder: Path, target: Path) -> None:
    """The logs and metrics of a run, in one file that is small enough to carry away."""
    with target.open("w") as out:
        for path in (*sorted((folder / "logs").glob("*.log")), *folder.glob("metrics.jsonl")):
            out.write(f"== {path.name}\n{path.read_text(errors='replace')[-200_000:]}\n")
    shutil.rmtree(folder, ignore_errors=True)
