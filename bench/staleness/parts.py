"""The four parts of the experiment as jobs, each a handful of members trained together.

A   every arm at every lag
B   tokens of one row from many versions, with the recorded denominator and with two wrong ones
C   learning rate against lag
D   the lag jumps up and comes back, with fixed bounds and with the controllers
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.staleness.adaptive import Driver, StepChange, run
from bench.staleness.arms import ARMS
from bench.staleness.simulate import Member, Plan, train

LR = 3e-3
"""Best area under the curve, and best final score, of `none` at lag 0 among 1e-3, 2e-3, 3e-3, 5e-3; seeds 100-102."""
LAGS = (0, 1, 4, 8, 16, 32, 64)
SEEDS = (0, 1, 2)
NUM_STEPS = 800
MIXED_LAGS = (64,)
MAP_LRS = (3e-4, 1e-3, 1e-2)  # LR itself comes from part A
MAP_LAGS = (0, 4, 16, 64)
MAP_SEEDS = (0,)
BOUNDS = (None, 4, 16, "adaptive")
MIXED = (
    ("none", "recorded"), ("token_tis", "recorded"), ("vtrace_critic_free", "recorded"),
    ("stream_default", "recorded"), ("token_tis", "first"), ("token_tis", "last"), ("stream_default", "first"),
    ("stream_default", "last"),
)  # fmt: skip
MAP_ARMS = ("none", "stream_default")
ADAPTIVE_ARMS = ("token_tis", "stream_default")


@dataclass(frozen=True, slots=True)
class Job:
    """One process' work. `part` is A, B, C or D."""

    name: str
    part: str
    plan: Plan | StepChange


def jobs(*, quick: bool = False) -> list[Job]:
    """Every job. The first seed of every arm comes first, so that an interrupted run already shows the whole picture.

    `quick` keeps the shape of the experiment and nothing of its meaning.
    """
    num_steps, seeds = (50, SEEDS[:1]) if quick else (NUM_STEPS, SEEDS)
    first, *others = (_every_arm(seed, num_steps) for seed in seeds)
    mixed = [
        Job(f"B-{arm}-{denominator}", "B", Plan(arm, _members(MIXED_LAGS, (LR,), seeds), num_steps, mixed=True,
                                                denominator=denominator))
        for arm, denominator in MIXED
    ]  # fmt: skip
    rates = [
        Job(f"C-{arm}", "C", Plan(arm, _members(MAP_LAGS, MAP_LRS, MAP_SEEDS), num_steps)) for arm in MAP_ARMS
    ]
    drivers = tuple(Driver(bound, LR, seed) for bound in BOUNDS for seed in seeds)
    driven = [
        Job(f"D-{arm}", "D", StepChange(arm, drivers, num_ticks=150 if quick else 900)) for arm in ADAPTIVE_ARMS
    ]
    return [*first, *driven, *rates, *mixed, *(job for several in others for job in several)]


def _every_arm(seed: int, num_steps: int) -> list[Job]:
    return [Job(f"A-{arm}-{seed}", "A", Plan(arm, _members(LAGS, (LR,), (seed,)), num_steps)) for arm in ARMS]


def _members(lags: Sequence[int], lrs: Sequence[float], seeds: Sequence[int]) -> tuple[Member, ...]:
    return tuple(Member(lag, lr, seed) for lr in lrs for lag in lags for seed in seeds)


def execute(job: Job) -> dict[str, Any]:
    """Run a job; the result is plain data for JSON, numbers rounded to four digits."""
    began = time.process_time()
    done = run(job.plan) if isinstance(job.plan, StepChange) else train(job.plan)
    return {
        "name": job.name,
        "part": job.part,
        "plan": plan_record(job),
        "cpu_s": round(time.process_time() - began, 1),
        "runs": [_rounded(asdict(one)) for one in done],
    }


def plan_record(job: Job) -> dict[str, Any]:
    """The plan without its members: those stand with their runs."""
    record = asdict(job.plan)
    for several in ("members", "drivers"):
        if several in record:
            record[f"num_{several}"] = len(record.pop(several))
    return record


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
