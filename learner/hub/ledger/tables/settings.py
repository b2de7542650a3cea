"""The numbers a ledger works with; what they come from is checked with the run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from streamrl.lag_rule import LagRule
from streamrl.messages import Limits, Sampling

OnStale = Literal["reissue", "drop"]
Mode = Literal["drop", "mask_old_tokens", "reweight", "wait"]
GroupPolicy = Literal["reissue_missing", "reissue_whole", "accept_partial"]


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Differences of training groups, and of their members, from the run's sampling.

    Args:
        members: the sampling of each member of a group; empty where all have the group's.
        final_temperature: reached after `num_batches` batches of groups; None keeps the run's.
    """

    members: tuple[Sampling, ...] = ()
    final_temperature: float | None = None
    num_batches: int = 0

    def of_group(self, base: Sampling, batch: int) -> Sampling:
        """The sampling of groups of this batch, counted from 0 as they are dispatched."""
        if self.final_temperature is None:
            return base
        way = min(1.0, batch / self.num_batches) * (self.final_temperature - base.temperature)
        return msgspec.structs.replace(base, temperature=base.temperature + way)

    def of_member(self, index: int) -> Sampling | None:
        """Sampling of a member; None if it is the group's."""
        return self.members[index] if self.members else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Settings of the ledger's rules.

    Args:
        lag: the lag rule to start with; eta and max_lag may move while the hub runs.
        group_size: G, members of one group.
        mode: what becomes of a group beyond max_lag. "drop": it does not enter. "mask_old_tokens": it enters if each
            member has a token within it. "reweight": as "drop"; the learner discounts old tokens. "wait": there is
            none, because the cut waits for the oldest group that is not consumed; needs `window` 0.
        num_groups_total: never have more groups than this that are not dropped; None is no end.
        min_members: fewest members of a group under "accept_partial".
        group_deadline_s: age at which an incomplete group follows `group_policy`; 0 never (under "accept_partial" 0
            accepts as soon as the lease ends).
        dedupe_window: sequence numbers that may be open per sender.
        limits: sizes that a group may have.
        num_passed_over: groups between two batches that are kept to be read although they are not trained on.
        slowest_turn_s: time that a turn may take in the slowest engine, during which an actor need show no progress.
        lease_max_s: age at which a lease ends whatever its actor shows; 0 never.
        keep_refused: the journal keeps the frames of groups that are refused for their age.
        sampling_rule: how training groups and their members differ in sampling.
        eval_keep_s: longest time for which an evaluation may delay the install of a newer version; 0 pins no version.
    Raises:
        ValueError: the lag rule is impossible or contradicts itself.
    """

    lag: LagRule
    group_size: int
    num_groups_total: int | None = None
    lease_ttl_s: float = 600.0
    dead_after_s: float = 3.0
    max_attempts: int = 3
    on_stale: OnStale = "reissue"
    mode: Mode = "drop"
    group_policy: GroupPolicy = "reissue_missing"
    min_members: int = 2
    group_deadline_s: float = 0.0
    dedupe_window: int = 1024
    limits: Limits = Limits()
    num_passed_over: int = 0
    eval_keep_s: float = 0.0
    slowest_turn_s: float = 0.0
    lease_max_s: float = 0.0
    keep_refused: bool = False
    sampling_rule: SamplingRule = SamplingRule()

    def __post_init__(self) -> None:
        self.lag.check()
