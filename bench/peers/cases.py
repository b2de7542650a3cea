"""Inputs of both systems: a model directory, a file of prompts with answers, a reward function, sizes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NUM_RECORDS = 20_000

REWARDS = '''"""Scores a completion; the same file for every system."""

import re


def score(kind, answer, text):
    if kind == "letters":  # share of right characters, as string.reverse counts them
        right = sum(a == b for a, b in zip(text, answer))
        return right / max(len(answer), len(text), 1)
    found = re.search(r"-?\\d+", text)
    return float(found is not None and found.group() == answer)


def reward_fn(prompts, completions, answer, kind, **kwargs):
    return [score(k, a, c) for k, a, c in zip(kind, answer, completions)]
'''


@dataclass(frozen=True, slots=True)
class Case:
    """One workload.

    Attributes:
        model: "tiny" (made and warm-started by the quickstart) or a directory.
        micro_batch: samples of one forward and backward pass of the peer; ours packs tokens.
        peer_threads: thread counts that the peer is tried with; with a real model two are faster than one by far.
            Without one, ours is compared with ours of `staleness.eta=0`.
        words: further settings of ours.
    """

    name: str
    model: str
    prompts: Callable[[random.Random], tuple[str, str]]
    kind: str
    num_groups: int
    group_size: int
    max_new_tokens: int
    max_prompt_tokens: int
    learning_rate: float
    num_steps: int
    num_dropped_steps: int
    micro_batch: int
    peer_threads: tuple[int, ...] = (2,)
    words: tuple[str, ...] = ()


def _letters(random_: random.Random) -> tuple[str, str]:
    text = "".join(random_.choice("abcdefghij") for _ in range(random_.randint(3, 8)))
    return f"{text}<sep>", text[::-1]  # the tiny model reads the separator after a prompt


def _sum(random_: random.Random) -> tuple[str, str]:
    a, b = random_.randint(1, 99), random_.randint(1, 99)
    return f"{a} + {b} =", str(a + b)


def _long_sum(random_: random.Random) -> tuple[str, str]:
    """A prompt of more than 300 tokens: forty solved sums before the one that is asked."""
    solved = [(random_.randint(10, 99), random_.randint(10, 99)) for _ in range(40)]
    lines = [f"{a} + {b} = {a + b}" for a, b in solved]
    question, answer = _sum(random_)
    return "\n".join([*lines, question]), answer


def _copy(random_: random.Random) -> tuple[str, str]:
    """Words to be repeated, two to five of them or forty: most answers have about 4 tokens, a few the limit of 64."""
    lists = [[random_.choice(WORDS) for _ in range(length)] for length in (3, 2, 5, 2, random_.choice(LENGTHS))]
    *shown, asked = (" ".join(words) for words in lists)
    return "\n".join([*(f"{words} = {words}" for words in shown), f"{asked} ="]), asked


WORDS = "red blue green apple stone river cloud horse table music paper window garden silver winter summer".split()
LENGTHS = (2, 2, 2, 3, 3, 4, 5, 40)


CASES = {
    "quickstart": Case("quickstart", "tiny", _letters, "letters", 16, 8, 12, 64, 3e-4, 60, 5, 128, (1, 2)),
    "sums": Case("sums", "models/smollm2-135m", _sum, "number", 8, 8, 8, 96, 2e-5, 10, 2, 64),
    "long_prompt": Case("long_prompt", "models/smollm2-135m", _long_sum, "number", 4, 8, 32, 512, 2e-5, 4, 1, 8),
    # A learning rate of practically 0: training changes answer lengths, and differently at each lag.
    "length_tail": Case("length_tail", "models/smollm2-135m", _copy, "letters", 8, 8, 64, 160, 1e-9, 12, 2, 16, (),
                        ('rollout.train.sampling.stop=["\n"]',)),
}


def write_inputs(case: Case, folder: Path, seed: int) -> None:
    """`train.jsonl` and `reward.py` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(seed)
    rows = [dict(zip(("prompt", "answer"), case.prompts(random_), strict=True), kind=case.kind)
            for _ in range(NUM_RECORDS if case.model == "tiny" else 2_000)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARDS)
