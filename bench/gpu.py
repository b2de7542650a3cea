"""What one GPU does to our path: every number beside the floor that physics sets on the same machine, in the same run.

    ceilings   copies inside the device, from pinned host memory, and a bf16 matrix product: the floors of the rest
    fold       the digest of buckets on the device, against reading them once
    ipc        a version from the sender's memory into another process, per GB, against two copies inside the device;
               and from the host's document, against one copy from the host
    install    pause and whole install of the native engine under running sequences, against one copy of the weights
    nccl       forming a group and a broadcast call through cupy, on a world of one (two ranks on one GPU where NCCL is
               2.30.3 or later); nothing moves in a world of one, so these are costs of the calls
    fsdp2      an optimizer step of one sharded rank, against the matrix product; and a publish, folded on the device

Run: bench/gpu.sh [--quick], or python -m bench.gpu --only ipc [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from bench import gpu_paths
from bench.record import exit_status, record, shared_arguments

GIB = 1 << 30
SECTIONS = ("ceilings", "fold", "ipc", "install", "nccl", "fsdp2")


def timed(work: Callable[[], object], repeats: int, warm_up: int = 3) -> list[float]:
    """Seconds of each call, the device synchronized at both ends."""
    samples = []
    for number in range(repeats + warm_up):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if number >= warm_up:
            samples.append(time.perf_counter() - started)
    return samples


class Floors:
    """What this device can do at most, measured when first asked for."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._known: dict[str, list[float]] = {}

    def samples(self, name: str) -> list[float]:
        if name not in self._known:
            self._known[name] = timed(getattr(self, f"_{name}")(), 10)
        return self._known[name]

    def seconds_per_gib(self, name: str) -> float:
        return statistics.median(self.samples(name)) * GIB / self.nbytes

    def _copy(self) -> Callable[[], object]:
        source, target = (torch.empty(self.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        return lambda: target.copy_(source)

    def _read(self) -> Callable[[], object]:
        source = torch.ones(self.nbytes // 4, dtype=torch.int32, device="cuda")
        return lambda: source.amax()

    def _pinned(self) -> Callable[[], object]:
        source = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda")
        return lambda: target.copy_(source, non_blocking=True)

    def matmul_flops(self) -> float:
        """bf16 matrix product of random numbers, FLOP/s."""
        if "matmul" not in self._known:
            a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            self._known["matmul"] = timed(lambda: a @ b, 10)
        return 2 * 8192**3 / statistics.median(self._known["matmul"])


def ceilings(args: argparse.Namespace, floors: Floors) -> list[dict]:
    lines = []
    for name, moved in (("copy", 2), ("read", 1), ("pinned", 1)):
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
    from streamrl.weights.gpu.fold128 import fold128, fold128_numpy

    data = torch.randint(0, 256, (floors.nbytes,), dtype=torch.uint8, device="cuda")
    if fold128(data[: 1 << 20]) != fold128_numpy(data[: 1 << 20].cpu().numpy()):
        sys.exit("wrong: the device's digest is not the host's")
    samples = [s * GIB / floors.nbytes * 1000 for s in timed(lambda: fold128(data), args.repeats)]
    bound = {"read_once_ms_per_gib": 1000 * floors.seconds_per_gib("read")}
    goal = {"id": "U6", "op": "<=", "value": 1000 * GIB / 500e9}
    params = {"bytes": floors.nbytes, "quick": args.quick}
    value = statistics.median(samples)
    return [record("gpu.fold.fold128", value, "ms/GiB", "lower", samples, params, goal=goal, bound=bound)]


def ipc(args: argparse.Namespace, floors: Floors) -> list[dict]:
    lines = []
    sizes = [0.25] if args.quick else [0.5, 1.0, 3.0]
    with gpu_paths.ReaderProcess() as reader:
        for kind, floor, copies in (("device", "copy", 2), ("host", "pinned", 1)):
            for gib in sizes:
                with gpu_paths.SlotScene(int(gib * GIB), kind, args.bucket_mib << 20) as scene:
                    results = [scene.update(reader) for _ in range(args.repeats + 2)][2:]
                samples = [1000 * (transfer + verify) / gib for transfer, verify, _ in results]
                params = {
                    "gib": gib, "source": kind, "bucket_mib": args.bucket_mib, "quick": args.quick,
                    "verify_ms_per_gib": 1000 * statistics.median(v for _, v, _ in results) / gib,
                    "first_ms": scene.first_ms,
                }
                bound = {f"{copies}_x_{floor}_ms_per_gib": 1000 * copies * floors.seconds_per_gib(floor)}
                name = f"gpu.ipc.update_{kind}_{gib:g}gib"
                value = statistics.median(samples)
                lines.append(record(name, value, "ms/GiB", "lower", samples, params, bound=bound, seed=args.seed))
    return lines


def install(args: argparse.Namespace, floors: Floors) -> list[dict]:
    lines = []
    for layers in [8] if args.quick else [16, 28]:
        for running in [8] if args.quick else [0, 64]:
            found = gpu_paths.measure_installs(layers, running, args.repeats, args.seed)
            gib = found.nbytes / GIB
            params = {
                "parameters": found.num_parameters, "gib": gib, "running": running, "dtype": "bfloat16",
                "decode_step_ms": found.step_ms, "quick": args.quick,
            }
            size = f"{found.num_parameters / 1e9:.1f}b_{running}running"
            pauses, installs = found.pause_ms, found.install_ms
            lines.append(record(
                f"gpu.install.pause_{size}", statistics.median(pauses), "ms", "lower", pauses, params,
                bound={"pointer_swap_ms": 0.0, "one_decode_step_ms": found.step_ms},
                goal={"id": "U3", "op": "<=", "value": 20.0},
            ))
            lines.append(record(
                f"gpu.install.whole_{size}", statistics.median(installs), "ms", "lower", installs, params,
                bound={"one_copy_ms": 1000 * gib * floors.seconds_per_gib("copy")},
            ))
    return lines


def nccl(args: argparse.Namespace, floors: Floors) -> list[dict]:
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


def fsdp2(args: argparse.Namespace, floors: Floors) -> list[dict]:
    found = gpu_paths.measure_fsdp2(8 if args.quick else 28, 2048 if args.quick else 8192, args.repeats, args.seed)
    flops = 6 * found.num_parameters * found.num_tokens  # forward and backward, attention left out
    gib = found.nbytes / GIB
    params = {
        "parameters": found.num_parameters, "tokens": found.num_tokens, "dtype": "bfloat16", "wire_gib": gib,
        "quick": args.quick,
    }
    floor = 1000 * flops / floors.matmul_flops()
    samples = found.step_ms
    return [
        record(
            "gpu.fsdp2.step", statistics.median(samples), "ms", "lower", samples, params, seed=args.seed,
            bound={"matmul_ms": floor},
        ),
        record(
            "gpu.fsdp2.publish", statistics.median(found.publish_ms), "ms", "lower", found.publish_ms, params,
            bound={"one_copy_to_pinned_host_ms": 1000 * gib * floors.seconds_per_gib("pinned")}, seed=args.seed,
        ),
    ]


def main() -> int:
    parser = shared_arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be repeated")
    parser.add_argument("--bucket-mib", type=int, default=256)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device, and none is visible here: nothing was measured", file=sys.stderr)
        return 3
    if args.quick:
        args.repeats, args.bucket_mib = min(args.repeats, 3), min(args.bucket_mib, 64)
    floors, lines = Floors(GIB // 4 if args.quick else GIB), []
    for name in args.only or SECTIONS:
        lines += globals()[name](args, floors)
        torch.cuda.empty_cache()
    return exit_status(lines, args.check)


if __name__ == "__main__":
    sys.exit(main())
