"""How long does a running sequence stand still while a version is installed? Part of `bench.weights`.

Sequences decode in the native engine, step after step; meanwhile a document of the model's size is installed. The
pause is the longest time between the ends of two consecutive forward passes from the call of `install` to its end,
minus the median time between two of them when nothing is installed: what a sequence waits longer than for its turn.
Copying the document beside the running model takes its share of the cores, and of this figure.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import Qwen3Config

from actors.engines.base import GenerateRequest
from actors.engines.native.engine import NativeEngine
from actors.engines.native.weights import checkpoint_tensors
from bench.record import record
from streamrl.messages import Sampling, VersionRef

SLOTS, PROMPT_TOKENS = 8, 16
CALM_STEPS = 20


def model_of_16m_parameters(seed: int) -> torch.nn.Module:
    """64 MiB in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1280, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


class StepClock:
    """When each forward pass of an engine ended."""

    def __init__(self, engine: NativeEngine) -> None:
        self.ends: list[float] = []
        step = engine._scheduler.step

        def watched() -> None:
            step()
            self.ends.append(time.perf_counter())

        engine._scheduler.step = watched

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between steps, of all gaps that overlap begin..end."""
        return [b - a for a, b in pairwise(self.ends) if b >= begin and a <= end]


async def measure(repeats: int, seed: int) -> tuple[list[float], list[float], int]:
    """(longest gaps while installing, median gaps while not, parameters), in ms."""
    model = model_of_16m_parameters(seed)
    num_steps = (repeats + 2) * 6 * CALM_STEPS
    engine = NativeEngine(model, None, max_num_seqs=SLOTS, max_tokens=PROMPT_TOKENS + num_steps, num_threads=1)
    weights = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model).items()}
    await engine.install(weights, VersionRef(1, 0))
    clock = StepClock(engine)
    prompt = list(range(2, 2 + PROMPT_TOKENS))
    requests = [GenerateRequest(prompt, Sampling(temperature=1.0), num_steps, n, ignore_eos=True) for n in range(SLOTS)]
    running = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    pauses, calm = [], []
    for version in range(1, repeats + 2):
        await steps_passed(clock, CALM_STEPS)
        forward = statistics.median(clock.gaps(clock.ends[-CALM_STEPS], clock.ends[-1]))
        begin = time.perf_counter()
        await engine.install(weights, VersionRef(1, version))
        end = time.perf_counter()
        await steps_passed(clock, 2)
        pauses.append(1000 * (max(clock.gaps(begin, end)) - forward))
        calm.append(1000 * forward)
    assert not any(future.done() for future in running), "a sequence ended: its pause was not seen"
    for future in running:
        future.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    return pauses[1:], calm[1:], sum(parameter.numel() for parameter in model.parameters())


async def steps_passed(clock: StepClock, count: int) -> None:
    upto = len(clock.ends) + count
    while len(clock.ends) < upto:
        await asyncio.sleep(0.001)


def pause_line(repeats: int, seed: int) -> dict[str, Any]:
    transformers.utils.logging.set_verbosity_error()
    pauses, forwards, num_parameters = asyncio.run(measure(repeats, seed))
    value, forward = statistics.median(pauses), statistics.median(forwards)
    print(f"weights.pause_ms.native  beyond one forward={value:.1f}ms  forward={forward:.1f}ms", file=sys.stderr)
    params = {
        "parameters": num_parameters, "dtype": "float32", "slots": SLOTS, "threads": 1,
        "forward_ms": round(forward, 3), "what": "longest gap between forward passes during an install, minus one",
    }
    goal = {"id": "P8", "op": "<=", "value": 10.0}
    return record("weights.pause_ms.native", value, "ms", "lower", pauses, params, goal=goal, seed=seed)
