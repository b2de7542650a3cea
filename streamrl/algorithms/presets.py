"""Whole recipes by name: which estimator, which surrogate, which guards.

A preset says what a recipe is; it computes nothing. `eta` and the lag bound depend on the system as much as on the
algorithm: take them as starting points. Every preset passes `check_pairing`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from streamrl.algorithms.surrogates.registry import SURROGATES

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, slots=True)
class Preset:
    """One recipe. None means off, or "the function's own default" for a knob that its surrogate does not have."""

    name: str
    # Estimator: what a token is credited with.
    estimator: str = "group"
    baseline: str = "none"  # none, group_mean, leave_one_out, opob
    scale: str = "none"  # none, std (of the group), batch_std (of the centered scores)
    scale_eps: float = 1e-6
    critic: bool = False
    num_critic_steps: int = 1  # critic updates per policy update
    critic_clip: float | None = None
    estimator_with_critic: str | None = None  # used instead of `estimator` when a critic is switched on
    whiten_with_critic: str | None = None
    gamma: float = 1.0
    lam: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    rho_bar_pg: float | None = None
    target_rho_bar: float = 1.0  # for a state-value critic with `retrace_v`
    whiten: str = "none"  # none, batch
    # Surrogate: what the policy minimizes.
    surrogate: str = "ppo_clip"
    anchor: str = "behavior"  # behavior, recomputed, loglinear, ewma, none
    eps_low: float | None = None
    eps_high: float | None = None
    dual_clip: float | None = None
    cap: float | None = None
    bound_low: float | None = None  # dppo_*
    bound_high: float | None = None
    budget: float | None = None  # m2po
    floor_low: float | None = None
    floor_high: float | None = None
    behavior_penalty: float = 0.0
    aggregation: str = "token-mean"
    # Guards against what is too far off-policy.
    correction: str = "disabled"
    veto_low: float | None = None
    veto_high: float | None = None
    opsm_delta: float | None = None
    opsm_over_budget_only: bool = False  # mask stale negatives only while m2 exceeds its target
    # Regularization, filters, step size, system.
    kl_mode: str = "off"  # off, reward_k1, or a kind of `kl_loss`
    kl_beta: float = 0.0
    entropy_coef: float = 0.0
    filters: tuple[str, ...] = ()  # zero_std, accuracy
    accuracy_low: float = 0.01
    accuracy_high: float = 0.99
    overlong_penalty: bool = False
    overlong_filter: bool = False
    lr_rule: str = "none"  # none, sqrt, linear
    lr_floor: float = 0.1
    eta: int = 1
    window: int | None = None  # None: as many groups as the batch holds

    @property
    def max_lag(self) -> int:
        """eta + 1: the bound that follows from a window of one batch."""
        return self.eta + 1

    def surrogate_knobs(self) -> dict[str, float | None]:
        """The keyword arguments of this preset's surrogate that the preset sets.

        `cap` of an uncapped `dppo_*` is passed as None, because that function has a cap by default.
        """
        accepted = inspect.signature(SURROGATES[self.surrogate]).parameters
        names = [name for name in self.__slots__ if name in accepted]
        uncapped = ("cap",) if self.surrogate.startswith("dppo") else ()
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None or name in uncapped}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Preset(
                name="stream_default",
                baseline="leave_one_out",
                estimator_with_critic="vtrace",
                whiten_with_critic="batch",
                eps_low=0.2,
                eps_high=0.28,
                dual_clip=3.0,
                veto_low=1e-4,
                veto_high=100.0,
                opsm_delta=0.5,
                opsm_over_budget_only=True,
                filters=("zero_std",),
                lr_rule="sqrt",
                eta=4,
            ),
            Preset(
                name="impala",
                estimator="vtrace",
                critic=True,
                num_critic_steps=2,
                rho_bar_pg=1.0,
                surrogate="reinforce",
                anchor="none",
                eta=1,
            ),
            Preset(
                name="areal",
                baseline="group_mean",
                scale="std",
                surrogate="decoupled_ppo",
                anchor="recomputed",
                eps_low=0.2,
                eps_high=0.2,
                cap=5.0,
                eta=4,
            ),
            Preset(
                name="prime",
                baseline="group_mean",
                surrogate="dppo_tv",
                bound_low=0.2,
                bound_high=0.2,
                behavior_penalty=1e-3,
                filters=("zero_std",),
                eta=8,
            ),
            Preset(
                name="scalerl",
                baseline="group_mean",
                scale="batch_std",
                surrogate="cispo",
                cap=5.0,
                aggregation="prompt-mean",
                filters=("zero_std",),
                eta=8,
            ),
            Preset(
                name="low_bias",
                baseline="opob",
                surrogate="seq_tis",
                cap=8.0,
                veto_low=1e-4,
                veto_high=100.0,
                aggregation="seq-mean-token-sum-norm",
                filters=("zero_std",),
                lr_rule="sqrt",
                eta=8,
            ),
            Preset(
                name="extreme_lag",
                baseline="leave_one_out",
                surrogate="m2po",
                budget=0.04,
                floor_low=0.3,
                floor_high=0.5,
                veto_low=1e-4,
                veto_high=100.0,
                filters=("zero_std",),
                eta=64,
            ),
            Preset(
                name="dr_grpo",
                baseline="group_mean",
                eps_low=0.2,
                eps_high=0.2,
                aggregation="seq-mean-token-sum-norm",
                filters=("zero_std",),
            ),
            Preset(
                name="grpo",
                baseline="group_mean",
                scale="std",
                eps_low=0.2,
                eps_high=0.2,
                aggregation="seq-mean-token-mean",
                kl_mode="k3_is",
                kl_beta=0.01,
            ),
            Preset(
                name="dapo",
                baseline="group_mean",
                scale="std",
                eps_low=0.2,
                eps_high=0.28,
                filters=("zero_std", "accuracy"),
                overlong_penalty=True,
                overlong_filter=True,
            ),
            Preset(
                name="ppo",
                estimator="gae",
                critic=True,
                critic_clip=0.5,
                lam=0.95,
                whiten="batch",
                eps_low=0.2,
                eps_high=0.2,
                kl_mode="reward_k1",
                kl_beta=1e-3,
            ),
            Preset(
                name="rloo",
                baseline="leave_one_out",
                surrogate="tis",
                cap=2.0,
                aggregation="seq-mean-token-sum",
                kl_mode="reward_k1",
                kl_beta=1e-3,
            ),
            Preset(
                name="reinforce_pp",
                estimator="reinforce_pp",
                whiten="batch",
                eps_low=0.2,
                eps_high=0.2,
                kl_mode="reward_k1",
                kl_beta=1e-3,
            ),
        )
    }
)


def preset(name: str) -> Preset:
    """The preset of that name; `ValueError` with the nearest names if there is none."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f", expected one of {', '.join(PRESETS)}"
        raise ValueError(f"unknown preset {name!r}{hint}")
    return PRESETS[name]
