"""Our path on one GPU: every number beside the floor that physics sets on the same machine, in the same run.

    ceilings   copies inside the device, to and from pinned host memory, and a bf16 matrix product: floors of the rest
    fold       the digest of buckets on the device, against reading them once
    ipc        a version from the sender's memory into another process, per GB, against two copies inside the device;
               and from the host's document, against one copy from the host
    nccl       forming a group and a broadcast call through cupy, on a world of one (two ranks on one GPU where NCCL is
               2.30.3 or later); nothing moves in a world of one, so these are costs of the calls
    ranks      two processes on this GPU where NCCL allows it: a group formed, aborted, a member killed, formed again;
               and the member that never comes (bench.gpu_nccl)
    shapes     attention of shapes that were never seen, with and without cuDNN, which builds a plan for each
    attention  one layer over a packed row, in padded blocks and without padding
    shared     passes over answers to one prompt, where the prompt is packed once and where it is packed for each answer
    head       log-probs and entropies of the output layer, forward and backward, against its matrix products
    lagzero    log-probs that an actor sampled with against the learner's for the same weights and tokens
    install    pause and whole install of the native engine under running sequences, of a document on the device and of
               one on the host, against one copy of the weights
    fsdp2      an optimizer step of one sharded rank on mixed lengths, against the matrix product; and a publish to
               shared memory, against one copy to the host
    vllm       the steps of bench/gpu_vllm.sh prove, as many as fit; of a dry run the first two
    one_gpu    experiment=one_gpu, launched with what is chosen for this GPU, and its line for a README
    quickstart the quickstart launched on one shared GPU, by shm and by ipc
    realsize   5 steps of a 0.6B model, launched: where the time of a step goes
    groups     the same model: 64 answers to 64 prompts beside 64 answers to 8

Run: bench/gpu.sh [--quick], or python -m bench.gpu --only ipc [--quick]. With --dry-run every section does its work on
the CPU with small shapes and no goals, to find wrong imports and arguments; its numbers mean nothing and are not kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import record as recording
from bench.record import exit_status, record, shared_arguments

GIB = 1 << 30
DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:  # before the sections are imported, here and in the processes that they start
    os.environ["STREAMRL_BENCH_DRY_RUN"] = tempfile.mkdtemp(prefix="gpu-dry-run-")
DEVICE = torch.device("cpu" if DRY_RUN else "cuda")
SECTIONS = (
    "vllm", "one_gpu", "ceilings", "fold", "ipc", "nccl", "ranks", "shapes", "attention", "shared", "head", "lagzero",
    "install", "fsdp2", "quickstart", "realsize", "groups",
)
LAST_STEP = (
    "throughput/generate_tokens_per_s", "throughput/train_tokens_per_s", "drift/mismatch", "lag/token_mean",
    "time/install_pause_s", "time/install_s", "time/visible_s", "hub/num_probe_failures", "hub/probe_mean_difference",
)
"""Metrics of a launched run's last step that are recorded."""
SHAPES = ("tiny",) if DRY_RUN else ("0.6b", "1.5b")


def wait() -> None:
    if not DRY_RUN:
        torch.cuda.synchronize()


def timed(work: Callable[[], object], repeats: int, warm_up: int = 3) -> list[float]:
    """Seconds of each call, the device synchronized at both ends."""
    samples = []
    for number in range(repeats + warm_up):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if number >= warm_up:
            samples.append(time.perf_counter() - started)
    return samples


class Floors:
    """The device's measured peak rates; measured on first use."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._known: dict[str, list[float]] = {}

    def samples(self, name: str) -> list[float]:
        if name not in self._known:
            self._known[name] = timed(getattr(self, f"_{name}")(), 2 if DRY_RUN else 10)
        return self._known[name]

    def seconds_per_gib(self, name: str) -> float:
        return statistics.median(self.samples(name)) * GIB / self.nbytes

    def _copy(self) -> Callable[[], object]:
        source, target = (torch.empty(self.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        return lambda: target.copy_(source)

    def _read(self) -> Callable[[], object]:
        source = torch.ones(self.nbytes // 4, dtype=torch.int32, device=DEVICE)
        return lambda: source.amax()

    def _from_pinned(self) -> Callable[[], object]:
        source = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=not DRY_RUN)
        target = torch.empty(self.nbytes, dtype=torch.uint8, device=DEVICE)
        return lambda: target.copy_(source, non_blocking=True)

    def _to_pinned(self) -> Callable[[], object]:
        target = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=not DRY_RUN)
        source = torch.empty(self.nbytes, dtype=torch.uint8, device=DEVICE)
        return lambda: target.copy_(source, non_blocking=True)

    def matmul_flops(self) -> float:
        """bf16 matrix product of random numbers, FLOP/s."""
        size = 64 if DRY_RUN else 8192
        if "matmul" not in self._known:
            a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            self._known["matmul"] = timed(lambda: a @ b, 10)
        return 2 * size**3 / statistics.median(self._known["matmul"])


def ceilings(args: argparse.Namespace, floors: Floors) -> list[dict]:
    lines = []
    for name, moved in (("copy", 2), ("read", 1), ("from_pinned", 1), ("to_pinned", 1)):
        rates = [moved * floors.nbytes / s / 1e9 for s in floors.samples(name)]
        params = {"bytes": floors.nbytes, "counts": "bytes read and written" if moved == 2 else "bytes"}
        lines.append(
            record(f"gpu.ceilings.{name}", statistics.median(rates), "GB/s", "higher", rates, params, seed=args.seed)
        )
    rate = floors.matmul_flops() / 1e12
    params = {"shape": [8192] * 3, "dtype": "bfloat16", "data": "normal"}
    lines.append(record("gpu.ceilings.matmul", rate, "TFLOP/s", "higher", [rate], params, seed=args.seed))
    return lines


def fold(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from streamrl.weights.gpu.device_document import fold128
    from tests.unit.weights.fold_reference import fold128_numpy

    data = torch.randint(0, 256, (floors.nbytes,), dtype=torch.uint8, device=DEVICE)
    if fold128(data[: 1 << 20]) != fold128_numpy(data[: 1 << 20].cpu().numpy()):
        sys.exit("wrong: the device's digest is not the host's")
    samples = [s * GIB / floors.nbytes * 1000 for s in timed(lambda: fold128(data), args.repeats)]
    bound = {"read_once_ms_per_gib": 1000 * floors.seconds_per_gib("read")}
    goal = {"id": "U6", "op": "<=", "value": 1000 * GIB / 500e9}
    params = {"bytes": floors.nbytes, "quick": args.quick}
    value = statistics.median(samples)
    return [record("gpu.fold.fold128", value, "ms/GiB", "lower", samples, params, goal=goal, bound=bound)]


def ipc(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench import gpu_paths

    lines = []
    sizes = [2**-10] if DRY_RUN else [0.25] if args.quick else [0.5, 1.0, 3.0]
    with gpu_paths.ReaderProcess() as reader:
        for kind, floor, copies in (("device", "copy", 2), ("host", "from_pinned", 1)):
            for gib in sizes:
                with gpu_paths.SlotScene(int(gib * GIB), kind, args.bucket_bytes) as scene:
                    results = [scene.update(reader) for _ in range(args.repeats + 2)][2:]
                samples = [1000 * (transfer + verify) / gib for transfer, verify, _ in results]
                params = {
                    "gib": gib, "source": kind, "bucket_bytes": args.bucket_bytes, "quick": args.quick,
                    "verify_ms_per_gib": 1000 * statistics.median(v for _, v, _ in results) / gib,
                    "first_ms": scene.first_ms,
                }
                bound = {f"{copies}_x_{floor}_ms_per_gib": 1000 * copies * floors.seconds_per_gib(floor)}
                name = f"gpu.ipc.update_{kind}_{gib:g}gib"
                value = statistics.median(samples)
                lines.append(record(name, value, "ms/GiB", "lower", samples, params, bound=bound, seed=args.seed))
    return lines


def nccl(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench import gpu_paths
    from streamrl.errors import ConfigError

    try:
        found = gpu_paths.measure_nccl(args.repeats, floors.nbytes)
    except ConfigError as error:
        print(f"gpu.nccl is skipped: {error}", file=sys.stderr)
        return []
    params = {"nccl": found.version, "world": 1, "bytes": floors.nbytes, "quick": args.quick}
    lines = [
        record("gpu.nccl.form", statistics.median(found.form_ms), "ms", "lower", found.form_ms, params),
        record(
            "gpu.nccl.broadcast_call", statistics.median(found.call_ms), "ms", "lower", found.call_ms, params,
            bound={"nothing_moves_ms": 0.0},
        ),
    ]
    if found.two_rank_ms is None:
        print(f"gpu.nccl two ranks: skipped, {found.why_not}", file=sys.stderr)
        return lines
    samples = [ms * GIB / floors.nbytes for ms in found.two_rank_ms]
    bound = {"copy_ms_per_gib": 1000 * floors.seconds_per_gib("copy")}
    value = statistics.median(samples)
    params |= {"world": 2}
    return [*lines, record("gpu.nccl.broadcast_two_ranks", value, "ms/GiB", "lower", samples, params, bound=bound)]


def ranks(args: argparse.Namespace, floors: Floors) -> list[dict]:
    """Run it in a process of its own, which may end though a thread is left inside NCCL."""
    words = ["--dry-run"] if DRY_RUN else []
    subprocess.run([sys.executable, "-m", "bench.gpu_nccl", *words, "--repeats", str(args.repeats)], check=True)
    return []


def shapes(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_learner import measure_new_shapes

    found = measure_new_shapes(3 if DRY_RUN else 20)
    return [
        record(f"gpu.shapes.new_{name}", statistics.median(samples), "ms", "lower", samples, {"quick": args.quick},
               bound={"without_cudnn_ms": statistics.median(found["without_cudnn"])}, seed=args.seed)
        for name, samples in found.items()
    ]


def attention(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_learner import measure_attention

    num_tokens = 256 if DRY_RUN else 16_384
    found, missing = measure_attention(num_tokens, args.repeats, args.seed)
    if missing:
        print(f"gpu.attention varlen: skipped, it {missing}", file=sys.stderr)
    return [
        record(f"gpu.attention.{kind}", statistics.median(samples), "ms", "lower", samples, {"tokens": num_tokens},
               seed=args.seed)
        for kind, samples in found.items()
    ]


def shared(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_learner import measure_shared_prompts, policy_of_shared_prompts

    lines, shape = [], args.shapes[0]
    cases = [("new", (8, 32)), ("alike", (8, 32)), ("alike_single", (8, 32)), ("new", (128, 512))]
    with policy_of_shared_prompts(shape) as (policy, attention):
        for case, (least, most) in cases[:3] if args.quick or DRY_RUN else cases:
            found = measure_shared_prompts(policy, case, (least, most), args.repeats)
            params = {
                "model": shape, "case": case, "answer_tokens": [least, most], "tokens": found.num_tokens,
                "packed_tokens": found.packed, "pass_ms": found.pass_ms, "peak_bytes": found.peak_bytes,
                "attention": attention, "recomputes_layers": True, "dtype": "bfloat16", "quick": args.quick,
            }
            ratios = [x / y for x, y in zip(found.pass_ms["alone"], found.pass_ms["prompts"], strict=True)]
            lines.append(record(f"gpu.shared.{case}_{most}", statistics.median(ratios), "x", "higher", ratios, params))
    return lines


def head(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_learner import measure_head

    num_tokens, hidden, vocab = (64, 32, 512) if DRY_RUN else (4096, 1024, 151_936)
    samples = measure_head(num_tokens, hidden, vocab, args.repeats)
    bound = {"four_products_ms": 1000 * 4 * 2 * num_tokens * hidden * vocab / floors.matmul_flops()}
    params = {"tokens": num_tokens, "hidden": hidden, "vocabulary": vocab}
    value = statistics.median(samples)
    return [record("gpu.head.forward_backward", value, "ms", "lower", samples, params, bound=bound)]


def lagzero(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_learner import measure_lag_zero

    sequences, tokens = (2, 8) if DRY_RUN else (16, 128)
    found = measure_lag_zero(args.shapes[0], sequences, tokens, args.seed)
    between = found.actor_to_learner
    params = {
        "model": args.shapes[0], "tokens": len(between), "p99": sorted(between)[99 * len(between) // 100],
        "largest": max(between), "dtype": "bfloat16",
        "actor_to_float32": statistics.fmean(found.actor), "learner_to_float32": statistics.fmean(found.learner),
    }
    rounding = statistics.fmean(found.plain)  # of transformers' own pass: two such passes differ by twice that at most
    mean = statistics.fmean(between)
    return [record("gpu.lagzero.mean_difference", mean, "nats", "lower", [mean], params,
                   bound={"of_a_plain_pass": rounding}, seed=args.seed)]


def install(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench import gpu_paths

    lines = []
    for shape in args.shapes[:1] if args.quick else args.shapes:
        for running, on_host in ((8, False),) if args.quick else ((0, False), (64, False), (64, True)):
            count = min(running, 2) if DRY_RUN else running
            found = gpu_paths.measure_installs(shape, count, args.repeats, args.seed, on_host=on_host)
            gib, floor = found.nbytes / GIB, "from_pinned" if on_host else "copy"
            params = {
                "model": shape, "parameters": found.num_parameters, "gib": gib, "running": count, "dtype": "bfloat16",
                "decode_step_ms": found.step_ms, "document": "host" if on_host else "device", "quick": args.quick,
            }
            name = f"{shape}_{count}running_{params['document']}"
            pauses, installs = found.pause_ms, found.install_ms
            lines.append(record(
                f"gpu.install.pause_{name}", statistics.median(pauses), "ms", "lower", pauses, params,
                bound={"pointer_swap_ms": 0.0, "one_decode_step_ms": found.step_ms},
                goal={"id": "U3", "op": "<=", "value": 20.0},
            ))
            lines.append(record(
                f"gpu.install.whole_{name}", statistics.median(installs), "ms", "lower", installs, params,
                bound={f"one_{floor}_ms": 1000 * gib * floors.seconds_per_gib(floor)},
            ))
    return lines


def fsdp2(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_learner import measure_fsdp2

    lines = []
    for shape in args.shapes[:1] if args.quick else args.shapes:
        num_tokens = 128 if DRY_RUN else 4096 if args.quick else 16_384
        found = measure_fsdp2(shape, num_tokens, args.repeats, args.seed)
        flops = 6 * found.num_parameters * found.num_tokens  # forward and backward, attention left out
        gib, step = found.nbytes / GIB, statistics.median(found.step_ms)
        floor = 1000 * flops / floors.matmul_flops()
        params = {
            "model": shape, "parameters": found.num_parameters, "tokens": found.num_tokens, "dtype": "bfloat16",
            "wire_gib": gib, "attention": found.attention, "of_matmul": floor / step, "peak_bytes": found.peak_bytes,
            "recomputes_layers": True, "quick": args.quick,
        }
        lines.append(record(f"gpu.fsdp2.step_{shape}", step, "ms", "lower", found.step_ms, params, seed=args.seed,
                            bound={"matmul_ms": floor}))
        bound = {"one_copy_to_pinned_host_ms": 1000 * gib * floors.seconds_per_gib("to_pinned")}
        for kind, samples in found.publish_ms.items():
            lines.append(record(f"gpu.fsdp2.publish_{kind}_{shape}", statistics.median(samples), "ms", "lower", samples,
                                params, bound=bound, seed=args.seed))
    return lines


def vllm(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_prove import STEPS, prove

    if importlib.util.find_spec("vllm") is None:
        print("gpu.vllm is skipped: it is not installed, see bench/gpu_vllm.sh", file=sys.stderr)
        return []
    return prove([*STEPS][:2] if DRY_RUN else [*STEPS], 390.0)  # less than bench/gpu.sh allows: no child is left


def one_gpu(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_runs import make_model, one_gpu_words
    from bench.gpu_shapes import large_folder

    if given := os.environ.get("MODEL"):
        return _launched("one_gpu", one_gpu_words(Path(given), 80, sums=True))
    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        model = make_model(Path(folder) / "model", args.shapes[0])
        return _launched("one_gpu", one_gpu_words(model, 6, sums=False))


def quickstart(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_runs import quickstart_words

    return [line for kind in ("shm,zmq", "ipc,shm,zmq")
            for line in _launched(f"quickstart_{kind.partition(',')[0]}", quickstart_words(20, kind))]


def realsize(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_runs import make_model, real_size_words
    from bench.gpu_shapes import large_folder

    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        model = make_model(Path(folder) / "model", args.shapes[0])
        return _launched(f"realsize_{args.shapes[0]}", real_size_words(model, 5))


def groups(args: argparse.Namespace, floors: Floors) -> list[dict]:
    from bench.gpu_runs import make_model, real_size_words
    from bench.gpu_shapes import large_folder

    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        model = make_model(Path(folder) / "model", args.shapes[0])
        words = [*real_size_words(model, 8), "algorithm=single_rollout", "eval.num_samples=0",
                 "rollout.train.sampling.max_new_tokens=256"]
        return [line for size in (8, 1) for line in _launched(f"groups_of_{size}", [
            *words, f"rollout.num_prompts_per_step={64 // size}", f"rollout.num_responses_per_prompt={size}",
        ])]


def _launched(name: str, words: list[str]) -> list[dict]:
    from bench import gpu_runs
    from bench.gpu_shapes import large_folder

    out = Path(os.environ.get("OUT") or tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        try:
            found = gpu_runs.launch(words, Path(folder) / "run", out / f"{name}.launch.log")
        finally:
            if not DRY_RUN:
                gpu_runs.keep_logs(Path(folder) / "run", out / f"{name}.logs.txt")
    if found is None:
        return []
    last = found.rows[-1]
    params = {
        "steps": found.steps, "phases_ms": found.phases_ms,
        "peak_bytes": max(row.get("system/gpu_allocated_bytes", 0) for row in found.rows),
        "last_step": {name: last.get(name) for name in LAST_STEP}, "in_one_line": found.line,
    }
    seconds = found.seconds_per_step
    return [record(f"gpu.{name}.step", statistics.median(seconds), "s", "lower", seconds, params)]


def main() -> int:
    parser = shared_arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be repeated")
    parser.add_argument("--bucket-bytes", type=int, default=256 << 20)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="models of the sections that measure several")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU; nothing is recorded")
    args = parser.parse_args()
    if not DRY_RUN and not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device, and none is visible here: nothing was measured", file=sys.stderr)
        return 3
    if args.quick or DRY_RUN:
        args.repeats, args.bucket_bytes = min(args.repeats, 3), min(args.bucket_bytes, 64 << 20)
    nbytes = GIB // 4 if args.quick else GIB
    if DRY_RUN:
        args.repeats, args.bucket_bytes, nbytes = 1, 1 << 18, 1 << 20
        recording.RESULTS = Path(os.environ["STREAMRL_BENCH_DRY_RUN"])
    floors, lines = Floors(nbytes), []
    for name in args.only or SECTIONS:
        lines += globals()[name](args, floors)
        if not DRY_RUN:
            torch.cuda.empty_cache()
    return 0 if DRY_RUN else exit_status(lines, args.check)


if __name__ == "__main__":
    sys.exit(main())
