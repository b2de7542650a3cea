"""What limits the speed of a run, as one line, from shares of time that its metrics hold.

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

IDLE_ENOUGH = 0.1
"""A learner that waits for less than this share of its time is the bottleneck."""
MORE_ENOUGH = 0.05
"""Actors that could make up for the learner's waiting with this share more of them, or less, wait as long as it."""

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
        num_actors: connected actors.
    """

    learner_idle: float
    starved: float
    paused: float
    environment: float
    step_p95_s: float
    num_actors: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The bottleneck; in words, for a line of 76 characters; and where more actors would help, how many, by the formula
    above."""

    bottleneck: Bottleneck
    text: str
    more_actors: float | None = None


def diagnose(shares: Shares) -> Diagnosis:
    """What limits the run; see the module."""
    idle, starved = shares.learner_idle, shares.starved
    waits = f"learner idle {idle:.0%}"
    if idle < IDLE_ENOUGH:
        return Diagnosis(Bottleneck.learner, f"learner-bound: {waits}, actors without work {starved:.0%}")
    growth = (1 - starved) / max(1 - idle, 1e-6) - 1
    if growth <= MORE_ENOUGH:
        text = f"lead-bound: {waits}, actors without work {starved:.0%}; raise staleness.eta"
        return Diagnosis(Bottleneck.lead, text)
    paused = min(1.0, shares.paused / max(1 - starved, 1e-6))
    parts = {
        Bottleneck.install: paused,
        Bottleneck.environment: (1 - paused) * shares.environment,
        Bottleneck.generation: (1 - paused) * (1 - shares.environment),
    }
    bottleneck = max(parts, key=lambda name: parts[name])
    more = shares.num_actors * growth
    text = {
        Bottleneck.install: f"install-bound: {waits}, engines paused for installs {paused:.0%}",
        Bottleneck.environment: f"environment-bound (step p95 {shares.step_p95_s:.2g} s): {waits}",
        Bottleneck.generation: f"generation-bound: {waits}, about {_count(more)} would fill it",
    }[bottleneck]
    return Diagnosis(bottleneck, text, None if bottleneck is Bottleneck.install else more)


def diagnosis_of(rows: Sequence[Row], num_recent: int | None = None) -> Diagnosis | None:
    """The diagnosis of a run, or of its last `num_recent` steps; None without heartbeats in that time."""
    shares = shares_of(rows, num_recent)
    return diagnose(shares) if shares is not None else None


def shares_of(rows: Sequence[Row], num_recent: int | None = None) -> Shares | None:
    """Shares over all steps but the first, which waited for the actors to start, or over the last `num_recent`."""
    steps = [row for row in rows if "time/step_s" in row]
    num = len(steps) - 1 if num_recent is None else min(num_recent, len(steps) - 1)
    if num < 1:
        return None
    # The row before them tells where the hub's sums stood.
    since = steps[-num - 1 :]
    gained = {name: _gained(since, f"hub/{name}") for name in _SUMS}
    whole = sum(row["time/step_s"] + row.get("time/checkpoint_s", 0.0) for row in since[1:])
    episodes = gained["episode_generation_s"] + gained["episode_environment_s"]
    if whole <= 0 or gained["actor_s"] <= 0:
        return None
    return Shares(
        learner_idle=sum(row.get("time/wait_s", 0.0) for row in since[1:]) / whole,
        starved=min(1.0, gained["actor_starved_s"] / gained["actor_s"]),
        paused=min(1.0, gained["actor_paused_s"] / gained["actor_s"]),
        environment=gained["episode_environment_s"] / episodes if episodes > 0 else 0.0,
        step_p95_s=since[-1].get("hub/env_step_p95_s", 0.0),
        num_actors=sum(row.get("hub/num_actors", 0.0) for row in since[1:]) / num,
    )


_SUMS = ("actor_s", "actor_starved_s", "actor_paused_s", "episode_generation_s", "episode_environment_s")


def _gained(rows: Sequence[Row], key: str) -> float:
    """What a sum grew by from the first row to the last; a hub that was restarted begins at 0."""
    values = [row[key] for row in rows if key in row]
    return sum(later - before if later >= before else later for before, later in zip(values, values[1:], strict=False))


def _count(more: float) -> str:
    """`1.6 more actors`; of many no decimals."""
    return f"{more:.1f} more actors" if more < 10 else f"{more:.0f} more actors"
