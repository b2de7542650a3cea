"""The arms of the experiment: names of estimator and surrogate with their knobs.

Where configs/algorithm has a recipe it is used as it stands; the others keep the defaults of the functions they name.
Nothing here was tuned. All critic-free arms share the leave-one-out baseline, so that only the treatment of staleness
differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from streamrl.algorithms import check_pairing
from streamrl.config.load import load_config
from streamrl.config.schema import OpsmWhen


@dataclass(frozen=True, slots=True)
class Arm:
    """One treatment of stale data; None means off."""

    name: str
    estimator: str = "group"
    baseline: str = "leave_one_out"
    scale: str = "none"
    rho_bar_pg: float | None = None
    critic: bool = False
    num_critic_steps: int = 1  # critic updates per policy update
    whiten: str = "none"
    surrogate: str = "ppo_clip"
    anchor: str = "behavior"
    knobs: Mapping[str, float | None] = field(default_factory=dict)  # keyword arguments of the surrogate
    aggregation: str = "token-mean"
    correction: str = "disabled"
    veto_low: float | None = None
    veto_high: float | None = None
    opsm_delta: float | None = None
    opsm_drift_only: bool = False  # mask stale negatives only while m2 exceeds its target
    filter_zero_std: bool = False
    lr_rule: str = "none"
    lr_floor: float = 0.1


def recipe(name: str) -> Arm:
    """The arm that configs/algorithm/NAME.yaml describes; its surrogate must be `ppo_clip` or `reinforce`."""
    config = load_config([f"algorithm={name}", "policy.model_path=none"])  # composing reads no model
    advantage, loss, scheduler = config.advantage, config.loss, config.policy.scheduler
    clip = {"eps_low": loss.clip_low, "eps_high": loss.clip_high, "dual_clip": loss.dual_clip}
    return Arm(
        name=name, estimator=advantage.estimator, baseline=advantage.baseline, scale=advantage.scale,
        rho_bar_pg=advantage.rho_bar_pg, critic=advantage.estimator == "vtrace",
        num_critic_steps=config.critic.num_steps, whiten=advantage.whiten, surrogate=loss.surrogate,
        anchor="none" if loss.surrogate == "reinforce" else loss.anchor or "behavior",
        knobs=clip if loss.surrogate == "ppo_clip" else {}, aggregation=loss.avg_level, correction=loss.correction,
        veto_low=loss.veto_low, veto_high=loss.veto_high, opsm_delta=loss.opsm_delta,
        opsm_drift_only=loss.opsm_when is OpsmWhen.over_budget, filter_zero_std=config.filter.zero_std,
        lr_rule=scheduler.ess_rule.value, lr_floor=scheduler.ess_floor,
    )


_CLIP = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
_STREAM = recipe("stream_default")
_STREAM_CRITIC = replace(_STREAM, estimator="vtrace", critic=True, whiten="batch")

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            Arm("none", surrogate="reinforce", anchor="none"),
            _STREAM,
            Arm("token_tis", surrogate="tis", knobs={"cap": 2.0}),
            Arm("seq_tis", surrogate="seq_tis", knobs={"cap": 2.0}),
            Arm("decoupled_ppo", surrogate="decoupled_ppo", anchor="loglinear"),
            Arm("dppo_tv", surrogate="dppo_tv", knobs={"cap": 20.0}),
            Arm("icepop", surrogate="icepop"),
            Arm("vtrace_critic_free", estimator="vtrace_critic_free", rho_bar_pg=1.0, surrogate="reinforce",
                anchor="none"),
            Arm("vtrace_critic_free_clip", estimator="vtrace_critic_free", knobs=_CLIP),
            recipe("impala"),
            replace(_STREAM_CRITIC, name="vtrace_critic_clip"),
            replace(_STREAM_CRITIC, name="retrace_v_clip", estimator="retrace_v"),
            Arm("m2po", surrogate="m2po"),
            Arm("vespo", surrogate="vespo"),
        )
    }
)

MEANING: Mapping[str, str] = MappingProxyType(
    {
        "none": "REINFORCE, no importance ratio (negative control)",
        "token_tis": "token ratio, truncated at 2",
        "seq_tis": "trajectory ratio, truncated at 2",
        "decoupled_ppo": "PPO clip on a log-linear proximal policy, weight truncated at 2",
        "dppo_tv": "token ratio, dropped beyond a total-variation bound of 0.2",
        "icepop": "token ratio, dropped outside 0.5 to 5",
        "vtrace_critic_free": "truncated suffix product, leave-one-out baseline, IMPALA loss",
        "vtrace_critic_free_clip": "the same suffix product, PPO clip on the behavior policy",
        "impala": "recipe: V-trace with a critic, IMPALA loss",
        "vtrace_critic_clip": "stream_default with a critic: V-trace, whitened, PPO clip on the behavior policy",
        "retrace_v_clip": "the same with Retrace in place of V-trace",
        "m2po": "PPO clip whose width keeps a second moment of 0.04",
        "vespo": "smooth trajectory weight",
        "stream_default": "recipe: PPO clip on the behavior policy, dual clip, veto, OPSM, sqrt-ESS step size",
    }
)


def check(arm: Arm, *, max_lag: int) -> None:
    """Refuse an arm whose terms do not carry exactly one importance ratio; only `none` may carry none."""
    check_pairing(
        arm.estimator, arm.surrogate, anchor=arm.anchor, correction=arm.correction, rho_bar_pg=arm.rho_bar_pg,
        max_lag=max_lag, allow_uncorrected=arm.name == "none",
    )
