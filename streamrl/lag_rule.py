"""The lag rule: how far generation may run ahead, how old a trained token may be, and the bound that follows.

A version counts optimizer steps. A batch of B groups takes S of them (minibatches times epochs, 1 by default), so batch
number n trains at the versions n S to n S + S - 1. The lag of a token is the version that trains it minus the version
that sampled it; it grows by one with every step of its batch, and the rule bounds it at the last. This module is the
only place of the rule: the config makes a `LagRule`, the staleness control moves it, and the ledger asks it.

    L1 lead      num_live <= (eta + 1) B + num_trained         groups drawn and not dropped
    L1 grant     S (rank // B) - installed <= eta S            rank = groups trained + live groups dispatched before
    window       an open group is overtaken by at most W later ones
    L2 age       version + S - 1 - oldest token <= max_lag     on arrival, and at the cut; version: of batch n, n S
    bound        S (eta + ceil(W / B)) + S - 1                 the default of max_lag: L2 then never fires
    L3 forced    groups held >= (eta + 1) B at the cut         only with `force`; at the end of a run all that are left

Proof of the bound. Let a group be granted at rank r to an actor with version v installed, so S (r // B) <= v + eta S.
Its tokens are of version v or newer, since installs only go up. Until batch n, which trains it, the learner trains
n B groups: each was counted in r or has overtaken the group, so n B <= r + W. Groups that are dropped only lower the
rank. Hence n <= (r + W) // B <= r // B + ceil(W / B). The last step of batch n trains at version n S + S - 1, so no lag
exceeds S (r // B) + S ceil(W / B) + S - 1 - v, which is at most the bound. With S = 1 it is eta + ceil(W / B).

Forced lag. With L3 nothing is open when batch n is cut, and the newest group held belongs to batch n + eta. It was
granted after batch n - 1 was cut, since capacity (L1 lead) had no place for it before batch n - 1 was trained, and its
grant needed version n S, of which there is no successor before batch n is cut. So all its tokens are of version n S
exactly, and it trains at lag S eta to S eta + S - 1. The first eta batches are younger, since the start version made
them; so is what replaces groups that were dropped, or given to another actor, after their batch was complete.

The grant rule reads the version *installed on the actor*. With the learner's own version in its place a late install
breaks the bound, and so does consuming groups in order of completion; tests show both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRule:
    """The numbers of the rule, and pure integer functions of them.

    Args:
        eta: allowed lead in batches; 0 is strictly synchronous.
        window: W, how many later groups may overtake an unfinished one.
        groups_per_batch: B, groups consumed by one batch.
        max_lag: hard bound on `version - token version` at every optimizer step that trains the token.
        steps_per_batch: S, optimizer steps of one batch.
        force: the lead is always used up before a batch is cut, so that the lag is this many batches; equals eta.
    """

    eta: int
    window: int
    groups_per_batch: int
    max_lag: int
    steps_per_batch: int = 1
    force: int | None = None

    @classmethod
    def from_settings(cls, *, max_lag: int | None, **terms: int) -> LagRule:
        """The rule of these terms; without a `max_lag` its bound is what they allow."""
        rule = cls(max_lag=0 if max_lag is None else max_lag, **terms)
        return replace(rule, max_lag=rule.bound) if max_lag is None else rule

    def check(self) -> None:
        """Raise ValueError for numbers that are impossible or contradict each other."""
        for name in ("groups_per_batch", "steps_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("eta", "window", "max_lag"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.force not in (None, self.eta):
            raise ValueError(f"force={self.force} is not eta={self.eta}: a forced lag is a lead that is always used up")
        least = replace(self, window=0).bound
        if self.max_lag < least:  # even with no overtaking, grants would admit what the cut refuses
            raise ValueError(
                f"max_lag={self.max_lag} is below {least}, the lag that a lead of eta={self.eta} batches allows: "
                "raise max_lag or lower eta"
            )

    def capacity(self, num_trained: int) -> int:
        """L1: groups that may be drawn and not dropped, trained ones included."""
        return (self.eta + 1) * self.groups_per_batch + num_trained

    def may_grant(self, rank: int, installed: int) -> bool:
        """L1: whether a group of this rank may be generated by an actor with this version installed."""
        return self.steps_per_batch * (rank // self.groups_per_batch) - installed <= self.steps_per_batch * self.eta

    def may_overtake(self, num_overtaken: int) -> bool:
        """Whether so many later groups may pass the oldest open one."""
        return num_overtaken <= self.window

    def num_to_cut(self, num_left: int | None) -> int:
        """L3: groups that must be held before a batch is cut; `num_left` of the run are not yet cut, None: no end."""
        if self.force is None:
            return self.groups_per_batch
        full = (self.eta + 1) * self.groups_per_batch
        return full if num_left is None else min(full, max(num_left, self.groups_per_batch))

    @property
    def bound(self) -> int:
        """The largest lag that L1 and the window allow, in optimizer steps: S (eta + ceil(W / B)) + S - 1."""
        num_batches = self.eta + -(-self.window // self.groups_per_batch)
        return self.last_step(self.steps_per_batch * num_batches)

    def at_eta(self, eta: int) -> LagRule:
        """The rule with another lead; the distance of its bound to the lead stays."""
        return replace(self, eta=eta, max_lag=self.max_lag + self.steps_per_batch * (eta - self.eta))

    def last_step(self, version: int) -> int:
        """The version at which a batch's last optimizer step trains, of a batch that begins at this version."""
        return version + self.steps_per_batch - 1

    def oldest_trainable(self, version: int, max_lag: int) -> int:
        """L2: the smallest token version that a batch which begins at this version may train within `max_lag`."""
        return self.last_step(version) - max_lag
