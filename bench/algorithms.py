"""What do estimators cost on long rows, and what share of a learner's step are estimator, surrogate and metrics?

    recursion   x_t = a_t + d_t x_{t+1} over [64, 4096]: the reversed loop of `algorithms.estimators.scan`, next to a
                scan by doubling (T log T work, log T passes) and one in blocks (2 sqrt T passes); proved equal here
    estimators  whole functions, ratios and masks included, on the loop and on each scan
    share       objective (advantages, masks, surrogate, metrics, its backward pass down to the log-probs) of one step
                on 4,096 tokens, over that plus the forward and backward passes of the model and the optimizer's step

Everything is CPU time of one thread, because a machine that others share stretches the clock on the wall. The scans
multiply decays over long stretches: decays above 1 (leak below 1, c_bar above 1) may overflow there, and infinity times
0 is not a number. The loop never forms such a product.

Run: python -m bench.algorithms [--quick] [--model models/smollm2-135m]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import streamrl.algorithms as algorithms
from bench.algorithms_step import share_of_step
from bench.record import exit_status, record, shared_arguments
from streamrl.algorithms import returns
from streamrl.algorithms.tokens import suffix_scan

ROWS, TOKENS = 64, 4096
_NO_RECURSION = ("group", "vtrace_critic_free")

Scan = Callable[[Tensor, Tensor, Tensor], Tensor]


def doubling_scan(increments: Tensor, decays: Tensor, last: Tensor) -> Tensor:
    """`suffix_scan` by composing affine maps over 1, 2, 4 ... positions."""
    sums, products, step = increments, decays, 1
    while step < increments.shape[1]:
        whole = torch.addcmul(sums[:, :-step], products[:, :-step], sums[:, step:])
        sums = torch.cat([whole, sums[:, -step:]], dim=1)
        products = torch.cat([products[:, :-step] * products[:, step:], products[:, -step:]], dim=1)
        step *= 2
    return torch.addcmul(sums, products, last[:, None])


def blocked_scan(increments: Tensor, decays: Tensor, last: Tensor, *, width: int = 64) -> Tensor:
    """`suffix_scan` inside all blocks of `width` at once, then over the blocks' first positions."""
    num_rows, length = increments.shape
    num_blocks = -(-length // width)
    padding = (0, num_blocks * width - length)
    sums = torch.nn.functional.pad(increments, padding).view(-1, width).t().contiguous()
    products = torch.nn.functional.pad(decays, padding, value=1.0).view(-1, width).t().contiguous()
    for place in range(width - 2, -1, -1):
        sums[place].addcmul_(products[place], sums[place + 1])
        products[place].mul_(products[place + 1])
    heads = suffix_scan(sums[0].view(num_rows, -1), products[0].view(num_rows, -1), last)
    following = torch.cat([heads[:, 1:], last[:, None]], dim=1).reshape(-1)
    return torch.addcmul(sums, products, following).t().reshape(num_rows, -1)[:, :length]


SCANS: dict[str, Scan] = {"loop": suffix_scan, "doubling": doubling_scan, "blocked": blocked_scan}


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """CPU time of this thread for each call, after two that do not count."""
    for _ in range(2):
        call()
    samples = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        samples.append(1e3 * (time.thread_time() - began))
    return samples


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Samples of every call, in rounds, so that a busy moment hits all of them."""
    rounds = [{name: milliseconds(call, 3) for name, call in calls.items()} for _ in range(repeats)]
    return {name: [sample for one in rounds for sample in one[name]] for name in calls}


def prove_equal(seed: int) -> None:
    """The scans are the loop, on random inputs, odd lengths included."""
    generator = torch.Generator().manual_seed(seed)
    for length in (1, 2, 63, 64, 65, 1000, TOKENS):
        increments = torch.randn(5, length, generator=generator, dtype=torch.float64)
        decays = torch.rand(5, length, generator=generator, dtype=torch.float64) * 1.02
        last = torch.randn(5, generator=generator, dtype=torch.float64)
        expected = suffix_scan(increments, decays, last)
        for scan in (doubling_scan, blocked_scan):
            torch.testing.assert_close(scan(increments, decays, last), expected, rtol=1e-10, atol=1e-10)


def measure_recursion(repeats: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for dtype in (torch.float32, torch.float64):
        increments = torch.randn(ROWS, TOKENS, generator=generator, dtype=dtype)
        decays = torch.rand(ROWS, TOKENS, generator=generator, dtype=dtype)
        last = torch.randn(ROWS, generator=generator, dtype=dtype)
        inputs = (increments, decays, last)
        samples = interleaved({name: partial(scan, *inputs) for name, scan in SCANS.items()}, repeats)
        lines += recorded(f"recursion.{str(dtype).removeprefix('torch.')}", samples, {"dtype": str(dtype)}, seed)
    return lines


def measure_estimators(repeats: int, seed: int) -> list[dict[str, Any]]:
    lines = []
    for name, call in estimator_calls(seed).items():
        def on(scan: Scan, call: Callable[[], object] = call) -> None:
            with mock.patch.object(returns, "suffix_scan", scan):
                call()

        scans = {"loop": suffix_scan} if name in _NO_RECURSION else SCANS
        samples = interleaved({kind: lambda scan=scan: on(scan) for kind, scan in scans.items()}, repeats)
        lines += recorded(f"estimator.{name}", samples, {"dtype": "torch.float32"}, seed)
    return lines


def estimator_calls(seed: int) -> dict[str, Callable[[], object]]:
    """Estimators on [64, 4096] float32 with a reward at the end, ratios of lagged data, gaps in the mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, TOKENS)
    behavior = -torch.rand(shape, generator=generator)
    policy = behavior + 0.1 * torch.randn(shape, generator=generator)
    values, bootstrap = torch.rand(shape, generator=generator), torch.zeros(ROWS)
    mask = torch.rand(shape, generator=generator) < 0.9
    scores = torch.rand(ROWS, generator=generator)
    groups = torch.arange(ROWS) // 8
    rewards = algorithms.place_terminal(scores, mask)
    ends = {"bootstrap_values": bootstrap}
    off_policy = (behavior, policy, rewards, values, mask)
    return {
        "group": lambda: algorithms.broadcast_rows(algorithms.group_advantages(scores, groups), mask),
        "gae": lambda: algorithms.gae(rewards, values, mask, lam=0.95, **ends),
        "vtrace": lambda: algorithms.vtrace(*off_policy, lam=0.95, **ends),
        "retrace_v": lambda: algorithms.retrace_v(*off_policy, lam=0.95, target_rho_bar=1.0, **ends),
        "vtrace_critic_free": lambda: algorithms.vtrace_critic_free(behavior, policy, scores, scores * 0.5, mask),
    }


def recorded(name: str, samples: dict[str, list[float]], params: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """One line for each kind of recursion, next to the loop; estimators without one have a single line."""
    medians = {kind: statistics.median(times) for kind, times in samples.items()}
    baseline = {"name": "reversed loop", "value": medians["loop"], "unit": "ms", "source": "this bench",
                "version": torch.__version__, "measured_here": True}
    shape = {"rows": ROWS, "tokens": TOKENS, "threads": 1, "clock": "CPU time of the thread"}
    return [
        record(f"algorithms.{name}.{kind}" if len(samples) > 1 else f"algorithms.{name}", medians[kind], "ms", "lower",
               times, {**shape, **params},
               baseline=None if kind == "loop" else baseline, seed=seed)
        for kind, times in samples.items()
    ]


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="for the share of a step")
    parser.add_argument("--steps", type=int, default=2, help="steps of the model that are measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prove_equal(arguments.seed)
    repeats = 2 if arguments.quick else arguments.repeats
    lines = measure_recursion(repeats, arguments.seed) + measure_estimators(repeats, arguments.seed)
    if (arguments.model / "config.json").exists():
        tokens, steps = (512, 1) if arguments.quick else (4096, arguments.steps)
        lines += share_of_step(arguments.model, num_tokens=tokens, num_steps=steps, seed=arguments.seed)
    else:
        print(f"No {arguments.model.name} (`make smollm2` makes it): the share of a step is left out.", file=sys.stderr)
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
