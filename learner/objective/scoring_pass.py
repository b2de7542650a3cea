"""The scoring pass: forward passes over the whole batch before its first gradient.

Most losses need none. A critic's values, whitening, weighted baselines, a KL term in the reward, and clip bounds that
follow the batch do; then every micro-batch is run once through the networks that are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.data.resized import dealt
from learner.data.transfer import on_device, on_host
from learner.model.critic import Critic
from learner.model.networks import FrozenPolicy
from learner.model.policy import Inspect, Inspected, Policy
from learner.objective import plan_tensors
from learner.objective.loss import estimated_advantages, shaped_advantages, token_masks
from learner.objective.options import WEIGHTED_BASELINES
from learner.objective.plan import BatchPlan
from learner.objective.plan_tensors import MicroBatchKey
from learner.objective.token_batch import POLICY, SQUARE_NORMS, VALUES, PassOutputs, TokenBatch
from learner.objective.whitening import whitened_in_groups
from learner.ranks.mesh import Ranks
from streamrl.algorithms import score_square_norms


@torch.no_grad()
def score_batch(
    policy: Policy, micro_batches: Sequence[MicroBatch], plan: BatchPlan, ranks: Ranks, *,
    critic: Critic | None = None, frozen: Mapping[str, FrozenPolicy | None] | None = None,
    passes: Sequence[MicroBatch] | None = None,
) -> BatchPlan:
    """The plan with what networks give for the whole batch; a collective call, or nothing at all.

    Args:
        frozen: policies that are only compared with, by the name of the need that each meets.
        passes: the same trajectories in micro-batches of another size, to be run in place of those that are trained.
    """
    needs, observed = plan.objective.needs, []
    if not needs:
        return plan
    for micro_batch in micro_batches if passes is None else passes:
        batch = micro_batch.to(ranks.device)
        found = _policy_side(policy, batch, needs, critic)
        for name, model in (frozen or {}).items():
            if name in needs:
                assert model is not None, f"the objective needs {name} log-probs, but the run has no such model"
                found[name] = batch.padded(model.score(batch))
        # Kept on the device until the step ends: the loss and the critic read them again.
        observed.append((batch, PassOutputs(**found)))
    if passes is not None:
        observed = dealt(micro_batches, observed, ranks.device)
    return with_outputs(plan, observed, ranks)


def with_outputs(plan: BatchPlan, observed: Sequence[tuple[MicroBatch, PassOutputs]], ranks: Ranks) -> BatchPlan:
    """The plan with these outputs of the networks, and with what depends on all of them; a collective call."""
    # An empty micro-batch only keeps this rank in step with the others' collectives.
    found = {batch.trajectory_ids: (batch, outputs) for batch, outputs in observed if batch.trajectory_ids}
    plan = replace(plan, outputs={key: outputs for key, (_, outputs) in found.items()})
    centers, fits = plan.objective.regularizers.centers_teacher, POLICY in plan.objective.needs
    # Fitted on the host: on a device each selection of tokens and each sum would be waited for.
    host = {key: tuple(on_host(*pair)) for key, pair in found.items()} if centers or fits else {}
    if centers:
        plan = replace(plan, teacher_mean=plan_tensors.teacher_mean(list(host.values()), ranks))
    if not fits:
        return plan
    fitted = _fitted(replace(plan, outputs={key: outputs for key, (_, outputs) in host.items()}), host, ranks)
    advantages = {key: on_device(one, found[key][0].mask.device) for key, one in fitted.advantages.items()}
    return replace(fitted, outputs=plan.outputs, advantages=advantages)


def _fitted(
    plan: BatchPlan, host: Mapping[MicroBatchKey, tuple[MicroBatch, PassOutputs]], ranks: Ranks
) -> BatchPlan:
    """Fix what depends on the policy's log-probs of the whole batch."""
    observed = []
    for batch, outputs in host.values():
        assert outputs.policy is not None, "the scoring pass brought no log-probs of the policy"
        observed.append(plan.tokens(batch, outputs.policy))
    objective = plan.objective
    advantage, estimator, regularizers = objective.advantage, objective.estimator, objective.regularizers
    # The order matters: rewards are shaped before a baseline looks at them, and advantages are whitened last.
    if regularizers.shapes_rewards:
        penalties = plan.tensors.gather(observed, regularizers.row_penalties, ranks)  # KL of whole trajectories
        tensors = replace(plan.tensors, scores=plan.tensors.scores - penalties)
        plan = replace(plan, tensors=tensors, row_advantages=plan_tensors.row_advantages(
            tensors, advantage, estimator,
            lambda: plan_tensors.shaped_moments(advantage, estimator, observed, regularizers, ranks),
        ))
    if advantage.baseline in WEIGHTED_BASELINES:
        rows = plan_tensors.weighted_row_advantages(plan.tensors, advantage, observed, ranks)
        plan = replace(plan, row_advantages=rows)
    # After the baselines, which do not read it, and before the estimator, which truncates by it.
    target = advantage.rho_bar_ess_target
    if target is not None:
        plan = replace(plan, rho_bar=plan_tensors.fitted_rho_bar(plan.tensors, observed, ranks, target=target))
    advantages = {tokens.micro.trajectory_ids: estimated_advantages(tokens, plan) for tokens in observed}
    if advantage.whiten == "batch":
        advantages = plan_tensors.whitened(advantages, observed, ranks)
    elif advantage.whiten == "group":
        advantages = whitened_in_groups(advantages, observed, plan.tensors, ranks)
    plan = replace(plan, advantages=advantages)
    if objective.surrogate.fit is not None:
        # Bounds are fitted to the tokens that will be trained on: the masks read the advantages fixed above.
        trusted = [_trusted(tokens, plan) for tokens in observed]
        bounds = plan_tensors.fitted_bounds(objective.surrogate.fit, trusted, ranks, plan.options)
        plan = replace(plan, bounds=bounds)
    return plan


def _trusted(tokens: TokenBatch, plan: BatchPlan) -> Tensor:
    """Log-ratios and advantages [2, n] of the tokens that no mask removes."""
    advantages = shaped_advantages(tokens, plan)
    keep = token_masks(tokens, plan, advantages).keep
    return torch.stack([tokens.log_ratios[keep], advantages[keep]])


def _policy_side(
    policy: Policy, batch: MicroBatch, needs: frozenset[str], critic: Critic | None
) -> dict[str, Tensor | None]:
    """Log-probs, gradient norms and the critic's values: one forward pass of the policy serves them all."""
    found: dict[str, Tensor | None] = {}
    seen: Inspected | None = None
    assert critic is not None or VALUES not in needs, "the objective needs values, but the run has no critic"
    if needs & {POLICY, SQUARE_NORMS} or (VALUES in needs and critic.reads_policy):
        inspect = Inspect(
            batch.state_index, square_sums=SQUARE_NORMS in needs, all_logprobs=critic is not None and critic.of_actions
        )
        seen = policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures, inspect,
            batch.sets,
        )
        found["policy"] = batch.padded(seen.logprobs)
        if seen.square_sums is not None:
            found["square_norms"] = score_square_norms(
                batch.padded(seen.logprobs.exp()), batch.padded(seen.square_sums), batch.mask
            )
    if VALUES in needs:
        found |= critic.look(batch, seen)
    return found
