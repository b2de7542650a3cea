"""The treatment of old data in one batch; the staleness control gives one to every batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms import lag_weights


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
        table = torch.tensor(self.m2_by_lag, device=lags.device)
        return table[lags.clamp(0, len(self.m2_by_lag) - 1)]
