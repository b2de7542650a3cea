"""The tokens of one micro-batch as every stage of the loss reads them, and the treatment of old ones.

A ratio is taken against the recorded behavior log-prob, or against a proximal policy between it and the current one:
`recomputed` (the policy before this batch), `loglinear` (on the line from one to the other), `ewma` (a moving average
of the policy's weights). All of them stay as they are for all optimizer steps of a batch.

Legend: S trajectories of the micro-batch, A most action tokens of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from streamrl.algorithms import lag_weights, log_ratios
from streamrl.weights.gpu.pinned import upload

EWMA = "ewma"
FROZEN = ("recomputed", "loglinear")
"""Anchors made of the policy before the batch: a batch of several optimizer steps needs its scoring pass for them."""
POLICY, VALUES, REFERENCE, PROXIMAL, SQUARE_NORMS = "policy", "values", "reference", "proximal", "square_norms"
TEACHER = "teacher"
"""What a scoring pass can be asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOutputs:
    """The networks' outputs for one micro-batch before the update; [S, A], detached, None where not asked for."""

    policy: Tensor | None = None  # log-probs
    reference: Tensor | None = None  # log-probs
    proximal: Tensor | None = None  # log-probs
    teacher: Tensor | None = None  # log-probs
    values: Tensor | None = None  # V(s_t), before token t
    bootstrap: Tensor | None = None  # [S] V(s_T+1) of truncated trajectories, 0 of finished ones
    action_values: Tensor | None = None  # Q(s_t, a_t), from a critic of action values
    square_norms: Tensor | None = None  # [S] squared norm of the gradient of the trajectory's log-prob in the logits


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Per-token values [S, A] of one micro-batch, each computed once.

    Attributes:
        micro: what was recorded: behavior log-probs, versions, rewards, turns.
        mask: bool, action tokens.
        policy: log-probs of the current policy; differentiable in the loss, detached in the scoring pass.
        entropy: of the policy's distribution at each token; None in the scoring pass.
        behavior: log-probs of the policy that sampled, as the actors recorded them; with `exact_at_lag_zero` those of
            the current policy at lag 0.
        log_ratios: log pi - log mu, clamped, detached.
        lags: int64, optimizer steps since the token was sampled, at this one.
        first_lags: the same at the first optimizer step of the batch.
        proximal: log-probs of the proximal policy, detached; None where the anchor is the behavior policy.
        outputs: what the scoring pass measured.
    """

    micro: MicroBatch
    mask: Tensor
    policy: Tensor
    entropy: Tensor | None
    behavior: Tensor
    log_ratios: Tensor
    lags: Tensor
    first_lags: Tensor
    proximal: Tensor | None
    outputs: PassOutputs

    @property
    def recorded_log_ratios(self) -> Tensor:
        """[S, A] log-ratios to what the actors recorded, at every lag: for checks of the engines, not for the loss."""
        return log_ratios(self.micro.behavior_logprobs, self.policy, self.mask)

    def detached(self) -> TokenBatch:
        """The same values without the graph that they came from."""
        return replace(
            self, policy=self.policy.detach(), entropy=None if self.entropy is None else self.entropy.detach()
        )

    def scored(self, name: str) -> Tensor:
        """An output of the scoring pass that some part of the loss cannot do without."""
        found = getattr(self.outputs, name)
        assert found is not None, f"the loss reads {name!r} of the scoring pass: run score_batch() before it"
        return found


@dataclass(frozen=True, slots=True)
class LagPolicy:
    """The rules of one batch; the defaults neither mask nor discount by lag. Lags to mask or discount by are those at
    its first optimizer step, so that no token changes its weight between the steps.

    Attributes:
        mask_beyond: tokens of a larger lag are left out of the loss, unless the hub's plan says that their trajectory
            is trained under a wider bound (its head lag is larger); None trains every age.
        discount_beyond: losses of tokens of a larger lag shrink by `decay` for every step beyond; None is never.
        drift_exceeded: drift exceeds its target, which is when some guards come on.
        opsm_scale: factor on loss.opsm_delta; below 1 off-policy sequence masking is stricter.
        m2_by_lag: mean squared log-ratio expected at lag 0, 1, ...; later lags count as the last. Empty is not known.
        spread_budget: head lags of one group that differ by more get baselines of their own; None never splits.
    """

    mask_beyond: int | None = None
    discount_beyond: int | None = None
    decay: float = 1.0
    drift_exceeded: bool = True
    spread_budget: int | None = None
    opsm_scale: float = 1.0
    m2_by_lag: tuple[float, ...] = ()

    def weights(self, lags: Tensor, mask: Tensor) -> Tensor | None:
        """Factors on the token losses [S, A], None if all are 1."""
        if self.discount_beyond is None:
            return None
        return lag_weights(lags, mask, max_lag=self.discount_beyond, decay=self.decay)

    def expected_m2(self, lags: Tensor) -> Tensor | None:
        """Drift that is usual at each token's lag [S, A], None if it is not known."""
        if not self.m2_by_lag:
            return None
        # Lags beyond the table are rarer than what an expectation can be taken over: they count as its last.
        table = upload(torch.tensor(self.m2_by_lag), lags.device)
        return table[lags.clamp(0, len(self.m2_by_lag) - 1)]
