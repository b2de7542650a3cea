"""The numbers a ledger works with, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from streamrl.messages.validate import GroupBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """What admission, consumption and delivery go by.

    Args:
        groups_per_batch: B, groups consumed by one batch.
        group_size: G, members of one group.
        eta: allowed lead in batches; 0 is strictly synchronous.
        window: W, how many later groups may overtake an unfinished one.
        max_lag: hard bound on `version - token version` at the cut, in optimizer steps.
        mode: what becomes of a group beyond max_lag. "drop": it does not enter. "mask_old_tokens": it enters if each
            member has a token within it. "reweight": as "drop"; the learner discounts old tokens on its side. "wait":
            there is none, because the cut waits for the oldest group that is not consumed; needs `window` 0.
        versions_per_batch: K, optimizer steps made from one batch.
        num_groups_total: never have more groups than this that are not dropped; None is no end.
        slots_per_actor_max: most training leases of one actor, whatever it asks for; None leaves it to the actor.
        min_members: fewest members of a group under "accept_partial".
        group_deadline_s: age at which an incomplete group follows `group_policy`; 0 never (under "accept_partial" 0
            accepts as soon as the lease ends).
        dedupe_window: sequence numbers that may be open per sender.
        bounds: limits of the semantic checks.
    Raises:
        ValueError: a number is impossible or contradicts another.
    """

    groups_per_batch: int
    group_size: int
    eta: int
    window: int
    max_lag: int
    versions_per_batch: int = 1
    num_groups_total: int | None = None
    lease_ttl_s: float = 600.0
    dead_after_s: float = 3.0
    max_attempts: int = 3
    on_stale: Literal["reissue", "drop"] = "reissue"
    mode: Literal["drop", "mask_old_tokens", "reweight", "wait"] = "drop"
    group_policy: Literal["reissue_missing", "reissue_whole", "accept_partial"] = "reissue_missing"
    min_members: int = 2
    group_deadline_s: float = 0.0
    dedupe_window: int = 1024
    slots_per_actor_max: int | None = None
    bounds: GroupBounds = field(default_factory=GroupBounds)

    def __post_init__(self) -> None:
        for name in ("groups_per_batch", "group_size", "versions_per_batch", "max_attempts", "dedupe_window"):
            _need(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("eta", "window", "max_lag", "group_deadline_s"):
            _need(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        for name in ("lease_ttl_s", "dead_after_s"):
            _need(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        self.check_bounds(self.eta, self.max_lag)
        modes = ("drop", "mask_old_tokens", "reweight", "wait")
        _need(self.mode in modes, f"mode={self.mode!r} must be one of {', '.join(modes)}")
        _need(self.mode != "wait" or self.window == 0, f"window={self.window} must be 0 under mode='wait'")
        _need(
            self.dedupe_window <= 1 << 16,
            f"dedupe_window={self.dedupe_window} is above 65536: a sender's tables would not stay small; lower it",
        )
        _need(
            self.slots_per_actor_max is None or self.slots_per_actor_max >= 1,
            f"slots_per_actor_max={self.slots_per_actor_max} must be at least 1, or None",
        )
        _need(
            self.num_groups_total is None or self.num_groups_total >= 0,
            f"num_groups_total={self.num_groups_total} must not be negative",
        )
        _need(self.on_stale in ("reissue", "drop"), f"on_stale={self.on_stale!r} must be reissue or drop")
        policies = ("reissue_missing", "reissue_whole", "accept_partial")
        _need(self.group_policy in policies, f"group_policy={self.group_policy!r} must be one of {', '.join(policies)}")
        _need(
            self.group_policy != "accept_partial" or 1 <= self.min_members <= self.group_size,
            f"min_members={self.min_members} must be in 1..group_size={self.group_size}",
        )

    def check_bounds(self, eta: int, max_lag: int) -> None:
        """Raise ValueError for a pair that contradicts itself: admission would let in what the cut refuses."""
        lead = eta * self.versions_per_batch
        _need(
            eta >= 0 and max_lag >= lead,
            f"max_lag={max_lag} is below {lead}, the lead that admission allows (eta={eta} batches of "
            f"{self.versions_per_batch} optimizer steps): raise max_lag or lower eta",
        )

    @property
    def lag_bound(self) -> int:
        """`lag_bound_at` the eta that the run starts with."""
        return self.lag_bound_at(self.eta)

    def lag_bound_at(self, eta: int) -> int:
        """Largest head lag that admission and order of consumption allow, in optimizer steps.

        `eta + ceil(W / B)` with one optimizer step a batch, `K (eta + ceil(W / B) + 1) - 1` with K.
        """
        batches = eta + ceil(self.window / self.groups_per_batch)
        return self.versions_per_batch * (batches + 1) - 1


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
