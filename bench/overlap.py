"""How much of the best possible overlap of generation and training does a real asynchronous run reach?

    T_bound    max of the seconds a batch takes to generate and to train, each measured alone on one thread
    T_bound_c  the same with both running at once, but not connected: what they cost each other by sharing the machine
    T          seconds a step of a real run: one learner, one actor, one thread each, hub and all
    E = T_bound / T        E_c = T_bound_c / T

Everything runs the same tiny model (hidden 128, 4 layers), the same prompts and the same batch size. Also printed: the
learner's idle share, and the share of its step that is neither waiting nor compute.

Run: python -m bench.overlap [--quick]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.record import exit_status, record, shared_arguments

BATCH, GROUP = 16, 8
WORDS = (
    "experiment=quickstart", "policy.tiny.num_layers=4", "policy.tiny.hidden_size=128",
    "policy.tiny.num_warm_start_steps=0",
    f"rollout.num_prompts_per_step={BATCH}", f"rollout.num_responses_per_prompt={GROUP}", "staleness.eta=2",
    "rollout.train.sampling.max_new_tokens=24", "rollout.train.sampling.ignore_eos=true", "eval.num_samples=0",
    "rollout.max_prompt_tokens=32", "actors.num_concurrent=128", "checkpoint.every_steps=0", "launch.num_actors=1",
)


def config_and_model() -> tuple[Any, Path]:
    import logging

    from envs.registry import load_task
    from learner.model.paths import model_directory
    from learner.ranks.mesh import Ranks
    from streamrl.config.load import load_config

    logging.disable(logging.INFO)
    config = load_config(WORDS)
    return config, model_directory(
        config.policy, load_task(config.env.name), Ranks(), seed=config.run.seed,
        max_positions=config.learner.max_tokens_per_device,
    )


async def groups(config: Any, model_dir: Path, num_batches: int) -> tuple[list[bytes], float]:
    """Encoded groups of one batch, and the seconds a batch takes with the engine kept full."""
    import torch

    from actors.engines.native.engine import NativeEngine, build_model
    from actors.engines.native.weights import checkpoint_tensors
    from actors.episode import EpisodeRunner
    from actors.render import Renderer, load_tokenizer
    from actors.rollout import run_group
    from actors.settings import episode_rules
    from envs.registry import load_task
    from streamrl.messages import Lease, Sampling, VersionRef
    from streamrl.messages.codec import encode

    torch.set_num_threads(1)
    sampling = config.rollout.train.sampling
    tokenizer = load_tokenizer(model_dir)
    model = build_model(model_dir, dtype=torch.float32, device="cpu")
    engine = NativeEngine(model, tokenizer, max_num_seqs=config.actors.num_concurrent, max_tokens=64, num_threads=1)
    weights = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    await engine.install(weights, VersionRef(1, 0))
    task = load_task(config.env.name)
    runner = EpisodeRunner(task, engine, Renderer(tokenizer), episode_rules(config, sampling))

    def lease(index: int) -> Lease:
        prompt = json.dumps(dict(task.record("train", index))).encode()
        members = tuple(range(GROUP))
        seeds = tuple(index * GROUP + m for m in members)
        return Lease(index, 0, index, 0, prompt, members, seeds, VersionRef(1, 0), Sampling(), 600.0)

    done: list[bytes] = []
    waiting = iter(range(BATCH * (num_batches + 1)))

    async def worker() -> None:
        for index in waiting:
            done.append(bytes(encode(await run_group(lease(index), runner))))
            times.append(time.perf_counter())

    times: list[float] = []
    await asyncio.gather(*(worker() for _ in range(config.actors.num_concurrent // GROUP + 1)))
    await engine.close()
    runner.executor.close()
    return done[:BATCH], (times[-1] - times[BATCH - 1]) / num_batches


def train_seconds(config: Any, model_dir: Path, frames: list[bytes], num_steps: int) -> float:
    """Median seconds of one optimizer step on a canned batch, decoding and packing included."""
    import torch

    from learner.data.packing import pack
    from learner.data.trajectories import read_groups
    from learner.hub_client.settings import answer_limit
    from learner.model.gradients import optimizer_step
    from learner.model.optimizer import make_optimizer, make_schedule
    from learner.model.policy import load_policy
    from learner.objective.objective import Objective
    from learner.objective.plan import BatchPlan
    from learner.objective.statistics import StepStatistics
    from learner.ranks.mesh import Ranks
    from learner.trainer import forward_backward
    from streamrl.messages import PlanRow

    torch.set_num_threads(1)
    ranks = Ranks()
    policy = load_policy(model_dir, ranks=ranks, chunk_tokens=config.learner.logprob_chunk_tokens)
    optimizer = make_optimizer(policy, config.policy.optimizer)
    schedule = make_schedule(config.policy.optimizer, config.policy.scheduler, num_steps=num_steps)
    objective = Objective(config.advantage, config.loss, max_new_tokens=answer_limit(config), max_lag=3)
    samples = []
    for step in range(num_steps):
        began = time.perf_counter()
        rows = read_groups(frames)
        plan = [PlanRow(r.group_id, r.index, 0, r.num_tokens, r.num_action_tokens, r.reward, 0) for r in rows]
        planned = BatchPlan.from_batch(objective, rows, plan, version=0, ranks=ranks)
        measured = StepStatistics(planned, ranks)
        for micro_batch in pack(rows, config.learner.max_tokens_per_device):
            forward_backward(policy, micro_batch, planned, measured, ranks)
        optimizer_step(policy, optimizer, schedule, step=step, max_grad_norm=1.0, ranks=ranks)
        measured.finish()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[2:])


def solo(what: str, count: int) -> float:
    """One side alone, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.overlap", "--solo", what, "--count", str(count)], capture_output=True, text=True,
        check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(done.stdout.split()[-1])


def together(count: int) -> tuple[float, float]:
    """Runs both sides at once, not connected."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.overlap", "--solo", what, "--count", str(count)], stdout=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for what in ("generate", "train")
    ]
    generate, train = (float(process.communicate()[0].split()[-1]) for process in started)
    return generate, train


def real_run(num_steps: int) -> list[dict[str, Any]]:
    """Rows of a launched run, the first ones (warming up) and the last ones (running dry) left out."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "launch", *WORDS, f"trainer.num_steps={num_steps}",
             f"run.dir={run_dir}"], check=True, capture_output=True,
        )
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row][5 : num_steps - 4]


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--solo", choices=["generate", "train"], help=argparse_hidden)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.solo:
        config, model_dir = config_and_model()
        frames, seconds = asyncio.run(groups(config, model_dir, arguments.count if arguments.solo == "generate" else 1))
        print(seconds if arguments.solo == "generate" else train_seconds(config, model_dir, frames, arguments.count))
        return 0
    repeats, count, steps = (1, 10, 25) if arguments.quick else (arguments.repeats, 25, 60)
    return exit_status(measure(repeats, count, steps, arguments.seed), arguments.check)


argparse_hidden = "used by the benchmark itself: one side alone"


def measure(repeats: int, count: int, num_steps: int, seed: int) -> list[dict[str, Any]]:
    config_and_model()  # made once, before any clock
    found: dict[str, list[float]] = {name: [] for name in ("E", "E_c", "idle", "other", "T", "T_bound", "T_bound_c")}
    for _ in range(repeats):
        bound = max(solo("generate", count), solo("train", count))
        bound_c = max(together(count))
        rows = real_run(num_steps)
        step = (rows[-1]["run/wall_s"] - rows[0]["run/wall_s"]) / (len(rows) - 1)
        busy = [row["time/step_s"] - row["time/wait_s"] for row in rows]
        compute = [row["time/forward_backward_s"] + row["time/optimizer_s"] for row in rows]
        for name, value in {
            "T": step, "T_bound": bound, "T_bound_c": bound_c, "E": bound / step, "E_c": bound_c / step,
            "idle": sum(row["time/wait_s"] for row in rows) / sum(row["time/step_s"] for row in rows),
            "other": 1 - sum(compute) / sum(busy),
        }.items():
            found[name].append(value)
    middle = {name: statistics.median(values) for name, values in found.items()}
    params = {"B": BATCH, "G": GROUP, "model": "hidden 128, 4 layers", "threads": "1 + 1", "num_steps": num_steps}
    limits = {"T_bound_s": middle["T_bound"], "T_bound_c_s": middle["T_bound_c"]}
    limits |= {"E": middle["E"], "E_c": middle["E_c"]}
    return [
        record("overlap.efficiency.real", middle["E"], "ratio", "higher", found["E"], params, bound=limits, seed=seed,
               goal={"id": "P5", "op": ">=", "value": 0.88}),
        record("overlap.efficiency_contended.real", middle["E_c"], "ratio", "higher", found["E_c"], params,
               bound=limits, seed=seed),
        record("overlap.learner_idle.real", 100 * middle["idle"], "%", "lower", [100 * x for x in found["idle"]],
               params, seed=seed),
        record("overhead.learner_not_compute", 100 * middle["other"], "%", "lower", [100 * x for x in found["other"]],
               params, seed=seed, goal={"id": "P4", "op": "<=", "value": 3.0}),
    ]


if __name__ == "__main__":
    sys.exit(main())
