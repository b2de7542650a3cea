"""Per-step differences of the hub's cumulative counters: drops by reason, lengths of what came."""

from __future__ import annotations

from collections.abc import Mapping

_RENAMED = {
    "num_groups_stale": "stale", "num_duplicates_dropped": "duplicate", "num_dropped_accuracy_range": "accuracy",
    "num_rejected_version": "version", "num_malformed_logprob_finite": "nonfinite_logprob",
    "num_returned_stale": "cancelled", "num_returned_too_long": "overlong",
}
_PREFIX = "num_dropped_"


class HubCounts:
    """Differences of the hub's cumulative counters between two rows."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since_last(self, counters: Mapping[str, float]) -> dict[str, float]:
        """`dropped/<reason>` of every reason that ever occurred, and `length/dispatched` if anything came."""
        row: dict[str, float] = {}
        for name, value in counters.items():
            reason = _RENAMED.get(name) or (name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None)
            if reason is not None and value:
                row[f"dropped/{reason}"] = row.get(f"dropped/{reason}", 0.0) + self._added(name, value)
        members = self._added("num_members_accepted", counters.get("num_members_accepted", 0.0))
        tokens = self._added("num_tokens_accepted", counters.get("num_tokens_accepted", 0.0))
        if members > 0:
            row["length/dispatched"] = tokens / members
        return row

    def _added(self, name: str, value: float) -> float:
        """A hub that was restarted counts from 0 again."""
        before = self._before.get(name, 0.0)
        self._before[name] = value
        return value - before if value >= before else value
