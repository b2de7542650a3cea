"""Tokens per second of the native engine on a CPU, in each form of its pass.

`modules` calls transformers' own code; `lean` does the same sums without it; `packed` also keeps large matrices in the
order that the processor's kernels read, which is what a run gets; `int8` computes their products in int8
(`actors.weights=int8`); `vllm` is vLLM's CPU build, its core in a process of its own, where it is installed and a model
is given. One engine of each with the same weights takes the same requests in turn: groups that share a prompt, every
answer as long as asked for. Ratios of processor time hold on a busy machine too.

Run: python -m bench.rollout_forms [--quick] [--model DIR] [--threads 1] [--slots 64]
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import torch
import transformers

from actors.engines.base import Engine, EngineSpec, GenerateRequest, build_engine
from actors.engines.native import matrices
from actors.engines.native.engine import NativeEngine, build_model
from actors.engines.native.weights import checkpoint_tensors
from actors.render import load_tokenizer
from bench.engine import SAMPLING, Job, make_jobs, small_model
from bench.record import exit_status, record, shared_arguments
from streamrl.messages import VersionRef

FORMS = ("modules", "lean", "packed", "int8", "vllm")
GROUP = 8


async def engine_of(form: str, args, weights: dict[str, torch.Tensor]) -> Engine:
    """An engine with these weights whose passes have this form."""
    if form == "vllm":
        spec = EngineSpec(
            model_dir=Path(args.model), tokenizer=load_tokenizer(args.model), max_num_seqs=args.slots,
            max_tokens=args.prompt_tokens + args.max_new, max_new_tokens=args.max_new, num_threads=args.threads,
        )
        other = build_engine("vllm", spec)
        await other.install(weights, VersionRef(1, 0))
        return other
    model = build_model(args.model, dtype=torch.float32, device="cpu") if args.model else small_model(args.seed + 1)
    with mock.patch.object(matrices, "PACK_FROM", matrices.PACK_FROM if form in ("packed", "int8") else math.inf):
        engine = NativeEngine(
            model, None, max_num_seqs=args.slots, max_tokens=args.prompt_tokens + args.max_new,
            num_threads=args.threads, weights="int8" if form == "int8" else "full",
        )
        if form == "modules":
            engine._scheduler.forward.lean = None
        await engine.install(weights, VersionRef(0, 0))
    return engine


def missing(form: str, args) -> str:
    """The reason why a form cannot be measured here; "" if it can."""
    if form != "vllm":
        return ""
    if importlib.util.find_spec("vllm") is None:
        return "it is not installed (make vllm)"
    return "" if args.model else "it needs a real model (--model)"


def vllm_version() -> str:
    import vllm

    return vllm.__version__


def processor_s(form: str) -> float:
    """Processor time of the process that computes this form; vLLM's has a core and its workers beside this one."""
    own = time.process_time()
    if form != "vllm":
        return own
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return own + sum(one.user + one.system for one in times)


async def tokens_per_s(form: str, engine: Engine, jobs: list[Job]) -> tuple[float, float]:
    """Tokens per second, and per second of processor time."""
    requests = [
        GenerateRequest(job.prompt, SAMPLING, job.num_new, seed, ignore_eos=True)
        for number, job in enumerate(jobs) for seed in range(number * GROUP, (number + 1) * GROUP)
    ]
    begin, used = time.perf_counter(), processor_s(form)
    await asyncio.gather(*(engine.generate(request) for request in requests))
    num_tokens, ended = GROUP * sum(job.num_new for job in jobs), time.perf_counter()
    return num_tokens / (ended - begin), num_tokens / (processor_s(form) - used)


async def measure(args) -> dict[str, list[tuple[float, float]]]:
    """Samples of each form, of turns that alternate."""
    if args.model:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(args.model, dtype=torch.float32, local_files_only=True)
    else:
        model = small_model(args.seed)
    weights = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    jobs = make_jobs(
        args.groups, args.prompt_tokens, args.mean_new, args.max_new, model.config.vocab_size, args.seed
    )
    engines = {form: await engine_of(form, args, weights) for form in args.forms}
    samples: dict[str, list[tuple[float, float]]] = {form: [] for form in args.forms}
    for turn in range(args.repeats + 1):
        of_turn = [Job([max(2, token - turn) for token in job.prompt], job.num_new) for job in jobs]  # in no cache yet
        for form in args.forms if turn % 2 else reversed(args.forms):
            rate = await tokens_per_s(form, engines[form], of_turn)
            if turn:  # the first warms up
                samples[form].append(rate)
    for engine in engines.values():
        await engine.close()
    return samples


def main() -> int:
    parser = shared_arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a real model (its configuration); default: small random")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--groups", type=int, default=16, help=f"prompts, with {GROUP} answers each")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--mean-new", type=int, default=32)
    parser.add_argument("--max-new", type=int, default=64)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.groups, args.mean_new, args.max_new = 2, 4, 8, 16
    for form in [form for form in args.forms if missing(form, args)]:
        print(f"skipped {form}: {missing(form, args)}", file=sys.stderr)
        args.forms.remove(form)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    load = os.getloadavg()[0]
    samples = asyncio.run(measure(args))

    params = {
        "model": args.model and os.path.basename(os.path.normpath(args.model)), "threads": args.threads,
        "slots": args.slots, "sequences": GROUP * args.groups, "prompt_tokens": args.prompt_tokens,
        "mean_new": args.mean_new, "max_new": args.max_new, "load_before": round(load, 2), "quick": args.quick,
    }  # fmt: skip
    size, base, lines = "real" if args.model else "small", samples[args.forms[0]], []
    for form, values in samples.items():
        ratios, of_cpu = (
            [round(one[clock] / other[clock], 3) for one, other in zip(values, base, strict=True)] for clock in (0, 1)
        )
        params_of = {**params, "form": form, "ratio_to": args.forms[0], "ratios": ratios, "cpu_ratios": of_cpu}
        if form == "vllm":
            params_of["vllm"] = vllm_version()
        rates = [rate for rate, _ in values]
        text = f"{size} {form:8} {statistics.median(rates):10,.1f} tok/s, {statistics.median(ratios):.2f} x"
        print(f"{text} {args.forms[0]}, {statistics.median(of_cpu):.2f} x by processor time", file=sys.stderr)
        lines.append(record(
            f"rollout_forms.decode.{size}_{form}", statistics.median(rates), "tok/s", "higher", rates, params_of,
            seed=args.seed,
        ))
    return exit_status(lines, args.check)


if __name__ == "__main__":
    sys.exit(main())
