"""The scoring pass: what must be known of a whole batch before its first gradient, measured without any.

Most losses need none. A critic's values, whitening, weighted baselines, a KL term in the reward, and clip bounds that
follow the batch do; then every micro-batch is run once through the networks that are asked for.

Legend: S trajectories of a micro-batch, A most action tokens of one, M scored tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.mesh import Ranks
from learner.model.critic import Critic
from learner.model.policy import Inspect, Inspected, Policy
from learner.model.reference import FrozenPolicy
from streamrl.algorithms import score_square_norms

POLICY, VALUES, REFERENCE, PROXIMAL, SQUARE_NORMS = "policy", "values", "reference", "proximal", "square_norms"
"""What a scoring pass can be asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOutputs:
    """One micro-batch as the networks see it before the update; [S, A] and detached, None where nobody asked."""

    policy: Tensor | None = None  # log-probs
    reference: Tensor | None = None  # log-probs
    proximal: Tensor | None = None  # log-probs
    values: Tensor | None = None  # V(s_t), before token t
    bootstrap: Tensor | None = None  # [S] V(s_T+1) of truncated trajectories, 0 of finished ones
    action_values: Tensor | None = None  # Q(s_t, a_t), from a critic of action values
    square_norms: Tensor | None = None  # [S] squared norm of the gradient of the trajectory's log-prob in the logits


class Scorer(Protocol):
    """Who decides what to measure, and is told: the objective."""

    ranks: Ranks

    @property
    def needs(self) -> frozenset[str]: ...

    def observe(self, batch: MicroBatch, scored: PassOutputs) -> None: ...

    def close_observation(self) -> None: ...


@torch.no_grad()
def score_batch(
    policy: Policy, micro_batches: Sequence[MicroBatch], objective: Scorer, *, critic: Critic | None = None,
    reference: FrozenPolicy | None = None, proximal: FrozenPolicy | None = None,
) -> None:
    """Run every micro-batch through the networks that the objective asks for; a collective call, or nothing at all."""
    needs = objective.needs
    if not needs:
        return
    for micro_batch in micro_batches:
        batch = micro_batch.to(objective.ranks.device)
        found = _policy_side(policy, batch, needs, critic)
        for name, model in ((REFERENCE, reference), (PROXIMAL, proximal)):
            if name in needs:
                assert model is not None, f"the objective needs {name} log-probs, and there is no such model"
                found[name] = batch.padded(model.score(batch))
        objective.observe(batch, PassOutputs(**found))
    objective.close_observation()


def _policy_side(
    policy: Policy, batch: MicroBatch, needs: frozenset[str], critic: Critic | None
) -> dict[str, Tensor | None]:
    """Log-probs, gradient norms and the critic's values: one forward pass of the policy serves them all."""
    found: dict[str, Tensor | None] = {}
    wants_values = VALUES in needs
    seen: Inspected | None = None
    if needs & {POLICY, SQUARE_NORMS} or (wants_values and critic is not None and critic.reads_policy):
        inspect = Inspect(
            batch.state_index, square_sums=SQUARE_NORMS in needs, all_logprobs=critic is not None and critic.of_actions
        )
        seen = policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures, inspect
        )
        found["policy"] = batch.padded(seen.logprobs)
        if seen.square_sums is not None:
            found["square_norms"] = score_square_norms(
                batch.padded(seen.logprobs.exp()), batch.padded(seen.square_sums), batch.mask
            )
    if wants_values:
        assert critic is not None, "the objective needs values, and there is no critic"
        found |= critic.look(batch, seen)
    return found
