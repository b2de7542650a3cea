"""The arms of the experiment: each is a `Preset`, that is, names of estimator and surrogate with their knobs.

Where the project has a preset it is used as it stands; the others keep the defaults of the functions they name. Nothing
here was tuned. All critic-free arms share the leave-one-out baseline, so that only the treatment of staleness differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from streamrl.algorithms import Preset, check_pairing, preset

_LOO = {"baseline": "leave_one_out"}
_CLIP = {"surrogate": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
_STREAM = preset("stream_default")

ARMS: Mapping[str, Preset] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            Preset(name="none", surrogate="reinforce", anchor="none", **_LOO),
            _STREAM,
            Preset(name="token_tis", surrogate="tis", cap=2.0, **_LOO),
            Preset(name="seq_tis", surrogate="seq_tis", cap=2.0, **_LOO),
            Preset(name="decoupled_ppo", surrogate="decoupled_ppo", anchor="loglinear", **_LOO),
            Preset(name="dppo_tv", surrogate="dppo_tv", cap=20.0, **_LOO),
            Preset(name="icepop", surrogate="icepop", **_LOO),
            Preset(name="vtrace_critic_free", estimator="vtrace_critic_free", rho_bar_pg=1.0, surrogate="reinforce",
                   anchor="none", **_LOO),
            Preset(name="vtrace_critic_free_clip", estimator="vtrace_critic_free", **_LOO, **_CLIP),
            preset("impala"),
            replace(_STREAM, name="vtrace_critic_clip", critic=True),
            replace(_STREAM, name="retrace_v_clip", critic=True, estimator_with_critic="retrace_v"),
            Preset(name="m2po", surrogate="m2po", **_LOO),
            Preset(name="vespo", surrogate="vespo", **_LOO),
        )
    }
)  # fmt: skip

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
        "impala": "preset: V-trace with a critic, IMPALA loss",
        "vtrace_critic_clip": "stream_default with a critic: V-trace, whitened, PPO clip on the behavior policy",
        "retrace_v_clip": "the same with Retrace in place of V-trace",
        "m2po": "PPO clip whose width keeps a second moment of 0.04",
        "vespo": "smooth trajectory weight",
        "stream_default": "preset: PPO clip on the behavior policy, dual clip, veto, OPSM, sqrt-ESS step size",
    }
)


def estimator_of(arm: Preset) -> str:
    """The estimator in use: a recipe may name another one for when it has a critic."""
    return arm.estimator_with_critic if arm.critic and arm.estimator_with_critic else arm.estimator


def check(arm: Preset, *, max_lag: int) -> None:
    """Refuse an arm whose terms do not carry exactly one importance ratio; only `none` may carry none."""
    check_pairing(
        estimator_of(arm), arm.surrogate, anchor=arm.anchor, correction=arm.correction, rho_bar_pg=arm.rho_bar_pg,
        max_lag=max_lag, allow_uncorrected=arm.name == "none",
    )  # fmt: skip
