"""Effect of bfloat16 on clip decisions: how many flip, and the change in the gradient of a step.

A random Llama is the policy, a copy with a little noise on its weights the actor. Each scores the same random tokens in
float32 and in bfloat16, both with log-softmax and log-ratios in float32, as learner and engines do; the PPO clip then
decides token by token. Compared is the gradient of the clipped loss over all float32 weights.

Run: python -m bench.bfloat16 [--repeats 3] [--quick]
"""

from __future__ import annotations

import copy
import statistics
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.record import exit_status, record, shared_arguments

SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 2048}  # fmt: skip
ROWS, TOKENS = 12, 128
LOW, HIGH = 0.2, 0.28
SPREADS = (0.1, 0.3)
"""Nats: standard deviation of the log-ratios; a policy that has moved little, and one that many clips hold back."""
SIDES = {"both": (True, True), "actor": (False, True), "learner": (True, False)}


def logprobs(model: Any, tokens: Tensor, *, rounded: bool) -> Tensor:
    """[rows, tokens - 1], differentiable in the float32 weights of `model`."""
    dtype = torch.bfloat16 if rounded else torch.float32
    weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    logits = torch.func.functional_call(model, weights, (tokens,)).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def step(policy: Any, actor: Any, tokens: Tensor, advantages: Tensor, rounded: tuple[bool, bool]) -> dict[str, Tensor]:
    """Log-ratios, clip decisions and the gradient of the clipped loss."""
    policy.zero_grad()
    with torch.no_grad():
        behavior = logprobs(actor, tokens, rounded=rounded[1])
    log_ratios = logprobs(policy, tokens, rounded=rounded[0]) - behavior
    ratios = log_ratios.exp()
    clipped = torch.where(advantages > 0, ratios > 1 + HIGH, ratios < 1 - LOW)
    torch.where(clipped, 0.0, -advantages * ratios).mean().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
    return {"log_ratios": log_ratios.detach(), "clipped": clipped, "gradient": gradient}


def measure(seed: int, spread: float) -> dict[str, dict[str, float]]:
    """What is rounded -> (error of a log-ratio, shares of clipped and of flipped tokens, change of the gradient)."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32)
    for weight in policy.parameters():
        weight.data *= 3.0 if weight.dim() > 1 else 1.0  # as large as trained ones: logits that differ
    tokens = torch.randint(SIZES["vocab_size"], (ROWS, TOKENS + 1))
    advantages = torch.randn(ROWS, TOKENS)
    actor = noisy(policy, tokens, spread)
    exact = step(policy, actor, tokens, advantages, (False, False))
    found = {}
    for side, rounded in SIDES.items():
        other = step(policy, actor, tokens, advantages, rounded)
        found[side] = {
            "log_ratio_error": float((other["log_ratios"] - exact["log_ratios"]).std()),
            "clipped": float(exact["clipped"].float().mean()),
            "flipped": float((other["clipped"] != exact["clipped"]).float().mean()),
            "gradient_change": float((other["gradient"] - exact["gradient"]).norm() / exact["gradient"].norm()),
        }
    return found


def noisy(policy: Any, tokens: Tensor, spread: float) -> Any:
    """A copy whose log-probs are so far away; the size of the noise is found in a few tries."""
    actor, scale = copy.deepcopy(policy), 1e-3
    for _ in range(4):
        generator = torch.Generator().manual_seed(1)
        for mine, its in zip(actor.parameters(), policy.parameters(), strict=True):
            mine.data = its.data + scale * its.data.std() * torch.randn(its.shape, generator=generator)
        with torch.no_grad():
            found = (logprobs(policy, tokens, rounded=False) - logprobs(actor, tokens, rounded=False)).std()
        scale *= spread / float(found)
    return actor


def main() -> int:
    arguments = shared_arguments(__doc__ or "").parse_args()
    seeds = range(arguments.seed, arguments.seed + (1 if arguments.quick else arguments.repeats))
    units = {"log_ratio_error": "nats", "clipped": "share", "flipped": "share", "gradient_change": "share"}
    lines = []
    for spread in SPREADS:
        runs = [measure(seed, spread) for seed in seeds]
        params = {**SIZES, "tokens": ROWS * TOKENS, "clip": [LOW, HIGH], "spread": spread}
        for side in SIDES:
            for what, unit in units.items():
                samples = [one[side][what] for one in runs]
                lines.append(record(f"bfloat16.{spread}.{side}.{what}", statistics.median(samples), unit, "lower",
                                    samples, params, seed=arguments.seed))  # fmt: skip
    return exit_status(lines, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
