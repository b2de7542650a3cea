"""Is the engine as busy with agents that call it over HTTP as with plain episodes of the same prompts?

One engine with a real model answers held-out sums greedily, twice per repeat: as plain episodes, and by an agent that
calls with the package openai once per episode. All answers have the same length. The value is the ratio of the shares
of time in which the engine steps; beside it the ratio of the tokens per second.

Run: python -m bench.agents_busy [--tokens 64] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from actors.evaluate import Progress, evaluate, num_prompts_of
from actors.local_policy import LocalPolicy, local_config, open_policy
from bench.record import exit_status, record, shared_arguments
from envs.registry import task_of
from streamrl.config.eval_sets import eval_sets

MODEL = "models/smollm2-135m"
ARMS = {"plain": (), "agent": ("env.agent=bench.agents_busy:run",)}
GOAL = 0.95


async def run(client: Any, record: Any) -> float:
    """An agent of one call; its reward is not looked at."""
    messages = [{"role": "user", "content": record["prompt"]}]
    await client.chat.completions.create(model="policy", messages=messages)
    return 0.0


@dataclass(frozen=True, slots=True)
class Played:
    """The same prompts, answered once."""

    busy_share: float
    tokens_per_s: float
    texts: list[str]


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, all of this length")
    parser.add_argument("--prompts", type=int, default=128)
    arguments = parser.parse_args()
    repeats, prompts = (1, 16) if arguments.quick else (arguments.repeats, arguments.prompts)
    words = [
        "experiment=smollm2", f"policy.model_path={MODEL}", f"eval.num_samples={prompts}",
        f"rollout.train.sampling.max_new_tokens={arguments.tokens}", "rollout.train.sampling.stop=[]",
        "rollout.train.sampling.ignore_eos=true",
    ]
    played = asyncio.run(alternated(words, repeats))
    same = all(one.texts == played["plain"][0].texts for runs in played.values() for one in runs)
    pairs = list(zip(played["agent"], played["plain"], strict=True))
    ratios = [agent.busy_share / plain.busy_share for agent, plain in pairs]
    speeds = [agent.tokens_per_s / plain.tokens_per_s for agent, plain in pairs]
    params = {
        "model": MODEL, "prompts": prompts, "tokens": arguments.tokens, "same_answers": same,
        "tokens_per_s_ratio": statistics.median(speeds), "tokens_per_s_ratios": speeds,
        **{f"{name}_busy_share": [one.busy_share for one in runs] for name, runs in played.items()},
        **{f"{name}_tokens_per_s": [one.tokens_per_s for one in runs] for name, runs in played.items()},
    }
    line = record("agents.busy_ratio", statistics.median(ratios), "ratio", "higher", ratios, params,
                  seed=arguments.seed, goal={"id": "busy", "op": ">=", "value": GOAL})
    return exit_status([line], arguments.check)


async def alternated(words: list[str], repeats: int) -> dict[str, list[Played]]:
    """Every arm so often, in turns; the first round, in which everything is loaded, does not count."""
    policy = await open_policy(local_config(MODEL, words))
    found: dict[str, list[Played]] = {name: [] for name in ARMS}
    try:
        for _ in range(repeats + 1):
            for name, more in ARMS.items():
                found[name].append(await played(policy, [*words, *more]))
    finally:
        await policy.engine.close()
    return {name: runs[1:] for name, runs in found.items()}


async def played(policy: LocalPolicy, words: list[str]) -> Played:
    (one,) = eval_sets(local_config(MODEL, words))
    task, out = task_of(one.config), io.StringIO()
    before, began = policy.engine.stats(), time.perf_counter()
    await evaluate(one, policy, task, out, Progress(num_prompts_of(one, task)))
    after, taken_s = policy.engine.stats(), time.perf_counter() - began
    lines = sorted((json.loads(line) for line in out.getvalue().splitlines()), key=lambda line: line["prompt_index"])
    if failed := [line["failure"] for line in lines if "failure" in line]:
        raise RuntimeError(f"{len(failed)} episodes failed: {failed[0]}")
    return Played((after.busy_s - before.busy_s) / taken_s, (after.tokens_total - before.tokens_total) / taken_s,
                  [line["text"] for line in lines])


if __name__ == "__main__":
    sys.exit(main())
