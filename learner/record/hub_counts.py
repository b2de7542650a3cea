"""Per-step differences of the hub's cumulative counters: what came, what was dropped, what actors spent time on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from streamrl.metrics.names import ARRIVED, METRICS, member

_RENAMED = {
    "num_groups_stale": "stale", "num_duplicates_dropped": "duplicate", "num_dropped_accuracy_range": "accuracy",
    "num_rejected_version": "version", "num_malformed_logprob_finite": "nonfinite_logprob",
    "num_returned_stale": "cancelled", "num_returned_too_long": "overlong",
}
_PREFIX = "num_dropped_"
_PART = f"{ARRIVED}part_"
_REASONS = [key for key in METRICS if key.startswith("dropped/") and key != "dropped/*"]

NUM_RECENT = 256
"""Trajectories of `reward/recent`."""


class HubCounts:
    """Differences of the hub's cumulative counters between two rows.

    Args:
        before: the counters at the start; a resumed hub goes on from those of its checkpoint.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._before: dict[str, float] = dict(before or {})
        self._recent: deque[tuple[float, float, float]] = deque()  # trajectories of a row, sums of reward and score

    def since_last(self, counters: Mapping[str, float], *, num_trained: float = 0.0) -> dict[str, float]:
        """The hub's counters of this step; what was not measured is left out.

        Args:
            num_trained: groups that the step trained on.
        """
        added = {name: self._added(name, value) for name, value in counters.items()}
        arrived = _arrived(added)
        return {**_dropped(added), **arrived, **self._latest(arrived), **_groups(added, num_trained), **_loads(added)}

    def _latest(self, arrived: Mapping[str, float]) -> dict[str, float]:
        """Means over the last trajectories, however many of them came in which step."""
        if not arrived:
            return {}
        count = arrived["reward/num"]
        self._recent.append((count, arrived["reward/mean"] * count, arrived["score/mean"] * count))
        while sum(one[0] for one in self._recent) - self._recent[0][0] >= NUM_RECENT:
            self._recent.popleft()
        counts, rewards, scores = map(sum, zip(*self._recent, strict=True))
        return {"reward/recent": rewards / counts, "score/recent": scores / counts}

    def _added(self, name: str, value: float) -> float:
        """A hub that was restarted counts from 0 again; sums of rewards may also shrink."""
        before = self._before.get(name, 0.0)
        self._before[name] = value
        return value - before if value >= before or name.startswith(ARRIVED) else value


def _dropped(added: Mapping[str, float]) -> dict[str, float]:
    """`dropped/<reason>`: of those in the list always, of others if they ever occurred."""
    row = dict.fromkeys(_REASONS, 0.0)
    for name, count in added.items():
        reason = _RENAMED.get(name) or (name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None)
        if reason is not None:
            row[f"dropped/{reason}"] = row.get(f"dropped/{reason}", 0.0) + count
    return row


def _arrived(added: Mapping[str, float]) -> dict[str, float]:
    """Means over the trajectories that came, before age and filters decided about them."""
    count = added.get("arrived_trajectories", 0.0)
    if count <= 0:
        return {}
    tokens, mean = added["arrived_tokens"], added["arrived_reward"] / count
    row = {
        "reward/mean": mean, "reward/num": count,
        "reward/std": math.sqrt(max(0.0, added["arrived_reward_squared"] / count - mean**2)),
        "score/mean": added["arrived_score"] / count,
        "length/dispatched": tokens / count,
        "length/dispatched_truncated_fraction": added.get("arrived_cut", 0.0) / count,
        "rollout/temperature": added.get("arrived_temperature", 0.0) / count,
        **{member("arrived", name.removeprefix(_PART)): value / count for name, value in added.items()
           if name.startswith(_PART)},
    }
    if tokens > 0:
        row["throughput/wire_bytes_per_token"] = added["arrived_bytes"] / tokens
    return row


def _groups(added: Mapping[str, float], num_trained: float) -> dict[str, float]:
    """Shares of groups by how they ended."""
    row = {}
    completed = added.get("num_groups_completed", 0.0)
    if completed > 0:
        row["group/zero_std_fraction"] = added["num_groups_zero_std"] / completed
    ends = {
        "group/filtered_fraction": added.get("num_groups_filtered", 0.0),
        "group/stale_fraction": added.get("num_groups_stale", 0.0),
        "group/failed_fraction": added.get("arrived_failed_groups", 0.0),
    }
    total = num_trained + sum(ends.values())
    return row | {key: count / total for key, count in ends.items()} if total > 0 else row


def _loads(added: Mapping[str, float]) -> dict[str, float]:
    """Shares of the actors' time; heartbeats bring it about once a second."""
    row, of_actors = {}, added.get("actor_s", 0.0)
    episodes = added.get("episode_generation_s", 0.0) + added.get("episode_environment_s", 0.0)
    if of_actors > 0:
        for name, part in (("idle", "idle"), ("starved", "starved"), ("install", "paused")):
            row[f"time/actor_{name}_fraction"] = min(1.0, added[f"actor_{part}_s"] / of_actors)
    if episodes > 0:
        row["time/environment_fraction"] = added["episode_environment_s"] / episodes
    return row
