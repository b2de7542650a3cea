"""How many useful tokens a second does the native engine give, next to transformers' own `generate`?

Same model object's weights, same process, same threads, same prompts and the same number of output tokens for every
sequence (end-of-sequence ignored). `generate` runs in batches of as many sequences as the engine has slots, padded on
the left, each batch as long as its longest member; tokens behind a sequence's own target are not counted. It is
measured twice: batches in the order of arrival, and batches sorted by length, which a user could only do by knowing the
lengths beforehand. Runs are interleaved. Before any clock starts, greedy outputs of both are compared.

Run: python -m bench.engine [--quick] [--model DIR] [--threads 1]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import Qwen3Config

from actors.engines.base import Engine, GenerateRequest
from actors.engines.native.engine import NativeEngine, build_model
from actors.engines.native.weights import checkpoint_tensors
from bench.record import exit_status, record, shared_arguments
from streamrl.messages import Sampling, VersionRef

GOAL = 1.5
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    num_new: int


def small_model(seed: int) -> torch.nn.Module:
    """0.9 M parameters: hidden 128, 4 layers, vocabulary 1,024, random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


def make_jobs(count: int, prompt_tokens: int, mean_new: int, max_new: int, vocab_size: int, seed: int) -> list[Job]:
    """Prompts of a quarter to all of `prompt_tokens`; output lengths lognormal (sigma 0.8), cut at `max_new`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(prompt_tokens // 4, prompt_tokens + 1, (count,), generator=generator).tolist()
    news = torch.randn(count, generator=generator).mul(0.8).exp().mul(mean_new * 0.73).clamp(1, max_new).int().tolist()
    return [
        Job(torch.randint(2, vocab_size, (length,), generator=generator).tolist(), new)
        for length, new in zip(lengths, news, strict=True)
    ]


def run_generate(model: torch.nn.Module, jobs: list[Job], batch: int, do_sample: bool = True) -> list[list[int]]:
    outputs: list[list[int]] = []
    for first in range(0, len(jobs), batch):
        part = jobs[first : first + batch]
        width = max(len(job.prompt) for job in part)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in part])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in part])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(job.num_new for job in part), do_sample=do_sample,
                temperature=1.0 if do_sample else None, top_k=0 if do_sample else None, top_p=None,
                eos_token_id=None, pad_token_id=0, output_scores=False,
            )  # fmt: skip
        outputs += [row[width : width + job.num_new].tolist() for row, job in zip(out, part, strict=True)]
    return outputs


async def run_engine(engine: Engine, jobs: list[Job], sampling: Sampling = SAMPLING) -> list[list[int]]:
    requests = [GenerateRequest(job.prompt, sampling, job.num_new, n, ignore_eos=True) for n, job in enumerate(jobs)]
    return [done.token_ids for done in await asyncio.gather(*(engine.generate(request) for request in requests))]


def timed(work: Callable[[], object], num_tokens: int) -> float:
    begin = time.perf_counter()
    work()
    return num_tokens / (time.perf_counter() - begin)


def main() -> int:
    parser = shared_arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a real model (configuration and safetensors); default: small random")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=0, help="sequences a repeat; 0 is 4 batches")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--mean-new", type=int, default=64)
    parser.add_argument("--max-new", type=int, default=256)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.mean_new, args.max_new = 2, 32, 96
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()

    if args.model:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(args.model, dtype=torch.float32, local_files_only=True).eval()
        twin = build_model(args.model, dtype=torch.float32, device="cpu")
    else:
        model, twin = small_model(args.seed), small_model(args.seed + 1)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    jobs = make_jobs(
        args.jobs or 4 * args.slots, args.prompt_tokens, args.mean_new, args.max_new, vocab_size, args.seed
    )
    lines = asyncio.run(_compare(args, model, twin, jobs))
    return exit_status(lines, args.check)


async def _compare(args, model: torch.nn.Module, twin: torch.nn.Module, jobs: list[Job]) -> list[dict]:
    engine = NativeEngine(
        twin, None, max_num_seqs=args.slots, max_tokens=args.prompt_tokens + args.max_new, num_threads=args.threads
    )
    weights = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    await engine.install(weights, VersionRef(0, 0))
    await _check_equal(engine, model, jobs[: args.slots])

    num_tokens = sum(job.num_new for job in jobs)
    by_length = sorted(jobs, key=lambda job: job.num_new)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"arrival": [], "sorted": []}
    for _ in range(args.repeats):
        for order, ordered in (("arrival", jobs), ("sorted", by_length)):
            theirs[order].append(timed(lambda ordered=ordered: run_generate(model, ordered, args.slots), num_tokens))
        begin = time.perf_counter()
        await run_engine(engine, jobs)
        ours.append(num_tokens / (time.perf_counter() - begin))
    await engine.close()
    return [_report(args, model, jobs, order, ours, theirs[order]) for order in ("arrival", "sorted")]


async def _check_equal(engine: NativeEngine, model: torch.nn.Module, jobs: list[Job]) -> None:
    """A fast wrong answer is no result: greedy tokens of both must agree (near-ties may part a few long sequences)."""
    short = [Job(job.prompt, min(job.num_new, 16)) for job in jobs]
    ours = await run_engine(engine, short, Sampling(temperature=0.0))
    theirs = run_generate(model, short, len(short), do_sample=False)
    differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
    if differing > len(short) // 10:
        sys.exit(f"wrong: {differing} of {len(short)} greedy outputs differ from `generate`")


def _report(args, model, jobs: list[Job], order: str, ours: list[float], theirs: list[float]) -> dict:
    value, other = statistics.median(ours), statistics.median(theirs)
    print(
        f"engine  batches={order}  native={value:,.0f} tok/s  generate={other:,.0f} tok/s  ratio={value / other:.2f}",
        file=sys.stderr,
    )
    params = {
        "model": type(model.config).__name__, "parameters": sum(p.numel() for p in model.parameters()),
        "slots": args.slots, "sequences": len(jobs), "prompt_tokens": args.prompt_tokens, "mean_new": args.mean_new,
        "max_new": args.max_new, "threads": args.threads, "dtype": "float32", "batches": order, "quick": args.quick,
    }  # fmt: skip
    baseline = {
        "name": f"transformers generate, batches in {order} order", "value": other, "unit": "tok/s",
        "source": "this bench, interleaved", "version": transformers.__version__, "measured_here": True,
    }  # fmt: skip
    size = "real" if args.model else "small"
    line = record(f"engine.decode.{size}_{order}", value, "tok/s", "higher", ours, params, baseline, seed=args.seed)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    goal = {"id": "engine", "op": ">=", "value": GOAL} if order == "arrival" and not args.quick else None
    ratio = record(
        f"engine.speedup.{size}_{order}", value / other, "ratio", "higher", ratios, params, goal=goal, seed=args.seed
    )
    return ratio if goal else line


if __name__ == "__main__":
    sys.exit(main())
