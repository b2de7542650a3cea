"""The scoring pass: forward passes over the whole batch before its first gradient.

Most losses need none. A critic's values, whitening, weighted baselines, a KL term in the reward, and clip bounds that
follow the batch do; then every micro-batch is run once through the networks that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.model.critic import Critic
from learner.model.policy import Inspect, Inspected, Policy
from learner.model.reference import FrozenPolicy
from learner.objective.objective import Objective
from learner.objective.token_batch import POLICY, PROXIMAL, REFERENCE, SQUARE_NORMS, VALUES, PassOutputs
from streamrl.algorithms import score_square_norms


@torch.no_grad()
def score_batch(
    policy: Policy, micro_batches: Sequence[MicroBatch], objective: Objective, *, critic: Critic | None = None,
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
        # Kept on the device until the step ends: the loss and the critic read them again.
        objective.observe(batch, PassOutputs(**found))
    objective.close_observation()


def _policy_side(
    policy: Policy, batch: MicroBatch, needs: frozenset[str], critic: Critic | None
) -> dict[str, Tensor | None]:
    """Log-probs, gradient norms and the critic's values: one forward pass of the policy serves them all."""
    found: dict[str, Tensor | None] = {}
    seen: Inspected | None = None
    assert critic is not None or VALUES not in needs, "the objective needs values, and there is no critic"
    if needs & {POLICY, SQUARE_NORMS} or (VALUES in needs and critic.reads_policy):
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
    if VALUES in needs:
        found |= critic.look(batch, seen)
    return found
