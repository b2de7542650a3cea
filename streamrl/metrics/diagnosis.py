"""The bottleneck of a run, as one line, from shares of time that its metrics hold.

    learner       it hardly ever waits: faster training is what helps
    generation    it waits, and the actors generate meanwhile
    environment   it waits, and the actors' episodes are in their environments
    install       it waits, and installs keep the actors' engines from generating
    lead          learner and actors wait for each other: the allowed lead is too small for both to work

**How many more actors.** Over some time N actors worked for a share `w` of theirs (they had leases) while the learner
worked for a share `1 - idle` of its own. Both handled the same groups, so the learner could take in `1 / (1 - idle)`
times as many, and the actors make `1 / w` times as many. The fleet that fits has `N * w / (1 - idle)` actors:

    more = N * (w / (1 - idle) - 1)

This assumes that another actor is as fast as those that are there, on a machine of its own; that answers stay as long;
and that a learner step takes as long as now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from streamrl.metrics.text import duration

IDLE_ENOUGH = 0.1
"""A learner that waits for less than this share of its time is the bottleneck; a gain below it is no advice."""
MORE_ENOUGH = 0.05
"""Actors that could make up for the learner's waiting with this share more of them, or less, wait as long as it."""
REAL_SHARE = 0.1
"""Environments whose steps take less of the actors' time are not what a run waits for, whatever was measured."""
NUM_WARM_UP = 3
"""First steps that are left out where there are more: actors start, threads are cold, modules are imported."""
ENOUGH_STEPS = 30
"""A whole run of fewer is too short to tell."""

Row = Mapping[str, Any]


class Bottleneck(StrEnum):
    learner = "learner"
    generation = "generation"
    environment = "environment"
    install = "install"
    lead = "lead"


@dataclass(frozen=True, slots=True)
class Shares:
    """Measured shares, in [0, 1].

    Attributes:
        learner_idle: of the learner's time, waiting for a batch.
        starved: of the actors' time, without a lease to work on.
        paused: of the actors' time, an install kept the engine from generating.
        environment: of the episodes' time, in their environments; the rest is in the engines.
        step_p95_s: 95th percentile of recent environment steps, in seconds.
        num_env_steps: environment steps for each second in which an actor had work.
        num_actors: connected actors.
    """

    learner_idle: float
    starved: float
    paused: float
    environment: float
    step_p95_s: float
    num_env_steps: float
    num_actors: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The bottleneck, None where nothing can be said; in words, for a line of 76 characters; and where more actors
    would help, how many, by the formula above."""

    bottleneck: Bottleneck | None
    text: str
    more_actors: float | None = None


def diagnose(shares: Shares) -> Diagnosis:
    """The bottleneck of the run; see the module."""
    idle, starved = shares.learner_idle, shares.starved
    waits = f"learner idle {idle:.0%}"
    if idle < IDLE_ENOUGH:
        return Diagnosis(Bottleneck.learner, f"learner-bound: {waits}, actors without work {starved:.0%}")
    growth = (1 - starved) / max(1 - idle, 1e-6) - 1
    if growth <= MORE_ENOUGH:
        saved = min(idle, starved)  # the side that works longer would never wait, at best
        if saved < IDLE_ENOUGH:
            return Diagnosis(Bottleneck.lead, f"lead-bound: {waits}, actors without work {starved:.0%}")
        text = f"lead-bound ({waits}, actors {starved:.0%}): higher staleness.eta saves ≤ {saved:.0%}"
        return Diagnosis(Bottleneck.lead, text)
    paused = min(1.0, shares.paused / max(1 - starved, 1e-6))
    environment = shares.environment if shares.step_p95_s * shares.num_env_steps >= REAL_SHARE else 0.0
    parts = {
        Bottleneck.install: paused,
        Bottleneck.environment: (1 - paused) * environment,
        Bottleneck.generation: (1 - paused) * (1 - environment),
    }
    bottleneck = max(parts, key=lambda name: parts[name])
    more = shares.num_actors * growth
    text = {
        Bottleneck.install: f"install-bound: {waits}, engines paused for installs {paused:.0%}",
        Bottleneck.environment: f"environment-bound (step p95 {duration(shares.step_p95_s)}): {waits}",
        Bottleneck.generation: f"generation-bound: {waits}, about {_count(more)} would fill it",
    }[bottleneck]
    return Diagnosis(bottleneck, text, None if bottleneck is Bottleneck.install else more)


def diagnosis_of(rows: Sequence[Row], num_recent: int | None = None) -> Diagnosis | None:
    """The diagnosis of a run, or of its last `num_recent` steps; None without heartbeats in that time."""
    num_steps = len(_steps(rows))
    if num_recent is None and 0 < num_steps < ENOUGH_STEPS:
        return Diagnosis(None, f"too short to tell ({num_steps} of at least {ENOUGH_STEPS} steps)")
    shares = shares_of(rows, num_recent)
    return diagnose(shares) if shares is not None else None


def learner_idle(rows: Sequence[Row], num_recent: int | None = None) -> float | None:
    """The share of its time that the learner waited for a batch, wherever it is told; None before the second step."""
    since = _since(_steps(rows), num_recent)[1:]
    whole = sum(row["time/step_s"] + row.get("time/checkpoint_s", 0.0) for row in since)
    return sum(row.get("time/wait_s", 0.0) for row in since) / whole if whole > 0 else None


def shares_of(rows: Sequence[Row], num_recent: int | None = None) -> Shares | None:
    """Shares over all steps but the first ones, or over the last `num_recent` of these."""
    since = _since(_steps(rows), num_recent)  # the row before them tells where the hub's sums stood
    idle = learner_idle(rows, num_recent)
    gained = {name: _gained(since, f"hub/{name}") for name in _SUMS}
    episodes = gained["episode_generation_s"] + gained["episode_environment_s"]
    busy_s = gained["actor_s"] - gained["actor_starved_s"]
    if idle is None or gained["actor_s"] <= 0:
        return None
    num = len(since) - 1
    turns = sum(row.get("rollout/num_turns/train", 1.0) for row in since[1:]) / num
    return Shares(
        learner_idle=idle,
        starved=min(1.0, gained["actor_starved_s"] / gained["actor_s"]),
        paused=min(1.0, gained["actor_paused_s"] / gained["actor_s"]),
        environment=gained["episode_environment_s"] / episodes if episodes > 0 else 0.0,
        step_p95_s=since[-1].get("hub/env_step_p95_s", 0.0),
        num_env_steps=turns * gained["num_members_accepted"] / busy_s if busy_s > 0 else 0.0,
        num_actors=sum(row.get("hub/num_actors", 0.0) for row in since[1:]) / num,
    )


def _steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "time/step_s" in row]


def _since(steps: list[Row], num_recent: int | None) -> list[Row]:
    """The steps to look at, and the one before them; with fewer than two of a run, nothing."""
    num = len(steps) - min(NUM_WARM_UP, max(1, len(steps) - 1))
    return steps[-1 - (num if num_recent is None else min(num_recent, num)) :] if num > 0 else []


_SUMS = ("actor_s", "actor_starved_s", "actor_paused_s", "episode_generation_s", "episode_environment_s",
         "num_members_accepted")


def _gained(rows: Sequence[Row], key: str) -> float:
    """The growth of a sum from the first row to the last; a hub that was restarted begins at 0."""
    values = [row[key] for row in rows if key in row]
    return sum(later - before if later >= before else later for before, later in zip(values, values[1:], strict=False))


def _count(more: float) -> str:
    """`1.6 more actors`; of many no decimals."""
    return f"{more:.1f} more actors" if more < 10 else f"{more:.0f} more actors"
