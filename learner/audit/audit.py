"""Scoring again, with the weights that actors had, what they say they sampled with them.

A version that is audited is chosen when it is published, by chance that no actor can foresee: a copy of it stays in
host memory until nothing of it can be trained any more. Of every batch until then, trajectories that name this version
alone are scored with it: their log-probs must agree, and where an engine draws by (seed, position), so must the tokens
of their first turn. Later turns may have been drawn with other streams: turns without tokens are not recorded.
Tokens after an install were computed with the cache of older weights, so trajectories of several versions are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from learner.checkpoint.shards import reshard
from learner.data.packing import MicroBatch, equalize, pack
from learner.data.trajectories import Trajectory
from learner.model.policy import Inspect, Inspected, Policy
from learner.objective.statistics import Agreements
from learner.publish.rounding import swapped_weights, trained_shards
from learner.ranks.mesh import Ranks
from streamrl.messages.seeding import draw_gaps, member_seed, uniforms

DRAW_SLACK = 0.02
"""A draw may lie this far from its token in the cumulative distribution: bfloat16 moves it by some thousandths."""


class Audit:
    """One version at a time.

    Args:
        wire_precision: the policy as actors have it, for a pass.
        share: of versions that are audited; 0 audits none.
        seed: of the run, from which those of its trajectories follow.
        max_lag: the largest that the run may have: data of a version ends then.
        max_tokens: of one pass.
        redraws: compare tokens with their seeds; not where an environment drives the generation, which may begin with
            turns that are not recorded, or draw otherwise.
    """

    def __init__(
        self, policy: Policy, ranks: Ranks, wire_precision: Callable[[], AbstractContextManager[None]], *,
        share: float, seed: int, max_lag: int, max_tokens: int, redraws: bool = True,
    ) -> None:
        self._policy, self._ranks, self._wire_precision = policy, ranks, wire_precision
        self._share, self._seed, self._max_lag, self._max_tokens = share, seed, max_lag, max_tokens
        self._random = random.SystemRandom()
        self._version, self.redraws = -1, redraws
        self._kept: list[Tensor] = []

    def published(self, version: int) -> None:
        """The policy is this version now: keep it, if chance says so; a collective call."""
        if not self._share or (self._kept and version - self._version <= self._max_lag):
            return
        self._kept = []
        if self._ranks.from_rank_zero(float(self._random.random() < self._share)):
            self._version, self._kept = version, [shard.to("cpu", copy=True) for shard in trained_shards(self._policy)]

    def score(self, rows: Sequence[Trajectory], agreements: Agreements) -> None:
        """Compare what this rank's rows say of the version that is kept; a collective call."""
        if not self._kept:
            return
        places = [place for place, row in enumerate(rows) if (row.versions[row.mask] == self._version).all()]
        if not self._ranks.maximum(float(bool(places))):
            return
        passes = equalize(pack(rows, self._max_tokens, places=places), self._ranks)
        with swapped_weights(self._policy, self._write), self._wire_precision():
            for micro_batch in passes:
                self._compare(micro_batch, rows, agreements)

    def _write(self, shards: list[Tensor]) -> None:
        for shard, kept in zip(shards, self._kept, strict=True):
            shard.copy_(kept)

    @torch.no_grad()
    def _compare(self, micro_batch: MicroBatch, rows: Sequence[Trajectory], agreements: Agreements) -> None:
        batch = micro_batch.to(self._ranks.device)
        seen = self._policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures,
            Inspect(batch.state_index, mass_below=True), batch.sets,
        )
        reshard(self._policy)  # no backward pass will free the gathered root
        if not batch.trajectory_ids:
            return
        rows = [rows[place] for place in batch.trajectory_ids]
        mismatches = (batch.padded(seen.logprobs) - batch.behavior_logprobs) * batch.mask
        agreements.mismatches |= dict(zip(batch.trajectory_ids, mismatches, strict=True))
        of_row = (micro_batch.flat_index // micro_batch.mask.shape[1]).numpy()
        drawn = self.redraws & (micro_batch.turns.flatten()[micro_batch.flat_index] == 0).numpy()
        other = drawn & (self._gaps(micro_batch, seen, rows, of_row) > DRAW_SLACK)
        sums = mismatches.abs().double().sum(1), batch.mask.sum(1)
        counts = (np.bincount(of_row, one, minlength=len(rows)).astype(int) for one in (drawn, other))
        for row, total, num_tokens, num_drawn, num_other in zip(
            rows, *(one.tolist() for one in (*sums, *counts)), strict=True
        ):
            agreements.add(row, 0, num_tokens, total, num_drawn, num_other)

    def _gaps(self, batch: MicroBatch, seen: Inspected, rows: Sequence[Trajectory], of_row: np.ndarray) -> np.ndarray:
        """The distance of each token [M] from the one that the seed of its row draws in a first turn."""
        seeds = np.array([member_seed(self._seed, row.group_id, row.index) for row in rows], dtype=np.uint64)
        places = (batch.positions[batch.score_index] + 1).numpy().astype(np.uint64)
        assert seen.mass_below is not None
        below, probs = (one.double().cpu().numpy() for one in (seen.mass_below, seen.logprobs.exp()))
        return draw_gaps(uniforms(seeds[of_row], places), below, probs)
