"""The native engine beside vLLM's CPU build: useful tokens a second for the same jobs, weights and number of threads.

Both run in one process (vLLM's core in a child of its own), one after the other, over and over; answers have the
lengths that the jobs ask for (end-of-sequence ignored). Greedy outputs of both are compared before any clock starts.

Run: python -m bench.engines [--model DIR] [--threads 1] [--jobs 48] [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from actors.engines.base import Engine, EngineSpec, build_engine
from actors.engines.native.weights import checkpoint_tensors
from actors.render import load_tokenizer
from bench.engine import Job, make_jobs, run_engine
from bench.record import exit_status, record, shared_arguments
from streamrl.messages import Sampling, VersionRef

GOAL = 1.2
NAMES = ("native", "vllm")
MAX_PROMPT, MEAN_NEW, MAX_NEW = 64, 64, 256


def main() -> int:
    parser = shared_arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m", help="folder of a model with its tokenizer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=48)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.jobs = 1, 8
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    return exit_status(asyncio.run(_compare(arguments)), arguments.check)


async def _compare(arguments: Namespace) -> list[dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, local_files_only=True).eval()
    jobs = make_jobs(arguments.jobs, MAX_PROMPT, MEAN_NEW, MAX_NEW, model.config.vocab_size, arguments.seed)
    spec = EngineSpec(
        model_dir=Path(arguments.model), tokenizer=load_tokenizer(arguments.model), max_num_seqs=arguments.slots,
        max_tokens=MAX_PROMPT + MAX_NEW, max_new_tokens=MAX_NEW, num_threads=arguments.threads,
    )
    engines = {name: build_engine(name, spec) for name in NAMES}
    try:
        for engine in engines.values():
            await engine.install({name: one.detach() for name, one in checkpoint_tensors(model).items()},
                                 VersionRef(1, 0))
        differing = await _num_differing(engines, jobs[: arguments.slots])
        rates: dict[str, list[float]] = {name: [] for name in NAMES}
        for repeat in range(arguments.repeats):
            for name, engine in engines.items():
                rates[name].append(await _rate(engine, jobs))
                print(f"{repeat} {name} {rates[name][-1]:.1f} tok/s", file=sys.stderr, flush=True)
    finally:
        for engine in engines.values():
            await engine.close()
    return [_report(arguments, jobs, rates, differing)]


async def _num_differing(engines: dict[str, Engine], jobs: list[Job]) -> int:
    """Greedy answers of 16 tokens that differ; near-ties may part a few."""
    short = [Job(job.prompt, min(job.num_new, 16)) for job in jobs]
    ours, theirs = [await run_engine(engine, short, Sampling(temperature=0.0)) for engine in engines.values()]
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


async def _rate(engine: Engine, jobs: list[Job]) -> float:
    began = time.perf_counter()
    await run_engine(engine, jobs)
    return sum(job.num_new for job in jobs) / (time.perf_counter() - began)


def _report(arguments: Namespace, jobs: list[Job], rates: dict[str, list[float]], differing: int) -> dict[str, Any]:
    import vllm

    ours, theirs = (statistics.median(rates[name]) for name in NAMES)
    return record(
        "engines.speedup", ours / theirs, "ratio", "higher",
        [a / b for a, b in zip(rates["native"], rates["vllm"], strict=True)],
        {"model": Path(arguments.model).name, "threads": arguments.threads, "slots": arguments.slots, "jobs": len(jobs),
         "tokens": sum(job.num_new for job in jobs), "rates": rates, "num_greedy_that_differ": differing,
         "vllm": vllm.__version__},
        goal={"id": "engines", "op": ">=", "value": GOAL}, seed=arguments.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
