"""The tokens of one micro-batch as every stage of the loss reads them.

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
from streamrl.algorithms import log_ratios, loglinear_proximal, token_lags

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

    @classmethod
    def of(
        cls, micro: MicroBatch, policy: Tensor, entropy: Tensor | None, outputs: PassOutputs, *, version: int,
        first_version: int, anchor: str, exact_at_lag_zero: bool = False,
    ) -> TokenBatch:
        """Tokens under the policy's log-probs; lags count from `version`, ratios are taken against the policy `anchor`.

        Args:
            first_version: at the first optimizer step of the batch. From the second one on, anchors come out of the
                scoring pass.
        """
        behavior, mask = micro.behavior_logprobs, micro.mask
        first = token_lags(micro.versions, first_version, mask)
        lags = first if version == first_version else token_lags(micro.versions, version, mask)
        if exact_at_lag_zero:
            behavior = torch.where(mask & (lags == 0), policy.detach(), behavior)
        # Without a scoring pass there is one optimizer step, and the current log-probs are those before the batch.
        assert outputs.policy is not None or version == first_version or anchor not in FROZEN, "an anchor has moved"
        before = policy.detach() if outputs.policy is None else outputs.policy
        proximal = None
        if anchor == "loglinear":
            proximal = loglinear_proximal(behavior, before, first, mask)
        elif anchor == "recomputed":
            proximal = before
        elif anchor == EWMA:
            proximal = outputs.proximal
        ratios = log_ratios(behavior, policy, mask)
        return cls(micro, mask, policy, entropy, behavior, ratios, lags, first, proximal, outputs)

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
