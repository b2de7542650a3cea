"""From settings to a surrogate: which loss settings it reads, and what is refused because it would do nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamrl.algorithms import ESTIMATORS, SURROGATES, check_pairing
from streamrl.config.schema import AdvantageConfig, LossConfig
from streamrl.errors import ConfigError

_CAPPED = ("decoupled_ppo", "tis", "cispo", "aipo", "seq_tis", "topr", "dppo_tv", "dppo_kl")
_WHOLE_RATIO = ("gspo", "gmpo")  # one ratio a trajectory: its tokens must be averaged before trajectories are
_LARGEST_GSPO_CLIP = 0.1
CRITIC_FREE = ("group", "reinforce_pp", "vtrace_critic_free")
"""Estimators that need nothing but rewards and log-probs."""
BASELINES = ("leave_one_out", "group_mean", "none")
SCALES = ("none", "std", "batch_std")
AVG_LEVELS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")


def _clip_distances(loss: LossConfig) -> dict[str, float]:
    return {"eps_low": loss.clip_low, "eps_high": loss.clip_high}


_FROM_CLIP: Mapping[str, Callable[[LossConfig], dict[str, Any]]] = {
    "ppo_clip": lambda loss: {**_clip_distances(loss), "dual_clip": loss.dual_clip},
    "decoupled_ppo": lambda loss: {**_clip_distances(loss), "dual_clip": loss.dual_clip},
    "gspo": _clip_distances,
    "dis": lambda loss: {"low": 1.0 - loss.clip_low, "high": 1.0 + loss.clip_high},
    "m2po": lambda loss: {"floor_low": loss.clip_low, "floor_high": loss.clip_high},
    "dppo_tv": lambda loss: {"bound_low": loss.clip_low, "bound_high": loss.clip_high},
    "dppo_kl": lambda loss: {"bound_low": loss.clip_low, "bound_high": loss.clip_high},
}
"""How `clip_low` and `clip_high` are read; the surrogates that are not here have constants of their own."""


def surrogate_options(loss: LossConfig) -> dict[str, Any]:
    """Keyword arguments for `SURROGATES[loss.surrogate]`."""
    options = dict(_FROM_CLIP.get(loss.surrogate, lambda _: {})(loss))
    if loss.cap is not None:
        options["cap"] = loss.cap
    return options


def check_settings(advantage: AdvantageConfig, loss: LossConfig, *, max_lag: int) -> None:
    """Refuse what is unknown, impossible, or without effect.

    Raises:
        ConfigError: names the setting, the value and the remedy.
    """
    _one_of("loss.surrogate", loss.surrogate, tuple(SURROGATES))
    _one_of("advantage.baseline", advantage.baseline, BASELINES)
    _one_of("advantage.scale", advantage.scale, SCALES)
    _one_of("loss.avg_level", loss.avg_level, AVG_LEVELS)
    _one_of("advantage.estimator", advantage.estimator, tuple(ESTIMATORS))
    if advantage.estimator not in CRITIC_FREE:
        raise ConfigError(
            f"advantage.estimator={advantage.estimator!r} needs values of a critic, and this run has none: "
            f"choose one of {', '.join(CRITIC_FREE)}."
        )
    anchor = {"decoupled_ppo": "loglinear", "reinforce": "none"}.get(loss.surrogate, "behavior")
    try:
        check_pairing(
            advantage.estimator, loss.surrogate, anchor=anchor, max_lag=max_lag,
            allow_uncorrected=loss.allow_uncorrected,
        )
    except ValueError as error:
        raise ConfigError(f"advantage.estimator and loss.surrogate: {error}") from error
    if advantage.estimator == "reinforce_pp" and advantage.scale != "none":
        raise ConfigError("advantage.estimator='reinforce_pp' whitens over the batch itself: set advantage.scale=none.")
    if advantage.estimator == "vtrace_critic_free":
        _check_bars(advantage)
    _check_loss(loss)


def _check_bars(advantage: AdvantageConfig) -> None:
    if not 0.0 < advantage.c_bar <= advantage.rho_bar:
        raise ConfigError(
            f"advantage.c_bar={advantage.c_bar} must lie between 0 and advantage.rho_bar={advantage.rho_bar}."
        )
    if not 0.0 <= advantage.lam <= 1.0:
        raise ConfigError(f"advantage.lam={advantage.lam} must lie in [0, 1].")


def _check_loss(loss: LossConfig) -> None:
    name = loss.surrogate
    if loss.cap is not None and name not in _CAPPED:
        raise ConfigError(f"loss.cap={loss.cap} does nothing with loss.surrogate={name!r}; only {', '.join(_CAPPED)}.")
    if loss.cap is not None and loss.cap <= 0:
        raise ConfigError(f"loss.cap={loss.cap} must be positive.")
    if not 0.0 <= loss.clip_low < 1.0 or loss.clip_high < 0.0:
        raise ConfigError(f"loss.clip_low={loss.clip_low} must lie in [0, 1), loss.clip_high={loss.clip_high} above 0.")
    if name in _WHOLE_RATIO and loss.avg_level != "seq-mean-token-mean":
        raise ConfigError(f"loss.surrogate={name!r} is defined for loss.avg_level='seq-mean-token-mean' only.")
    if name == "gspo" and max(loss.clip_low, loss.clip_high) > _LARGEST_GSPO_CLIP:
        raise ConfigError(
            f"loss.surrogate='gspo' clips the mean ratio of a trajectory, which stays within about 0.001 of 1; with "
            f"loss.clip_high={loss.clip_high} it would never clip: set about loss.clip_low=3e-4 loss.clip_high=4e-4."
        )
    low, high = loss.veto_low or 0.0, loss.veto_high or float("inf")
    if not 0.0 <= low < 1.0 < high:
        raise ConfigError(f"loss.veto_low={loss.veto_low} and loss.veto_high={loss.veto_high} must lie around 1.")
    if loss.behavior_penalty < 0:
        raise ConfigError(f"loss.behavior_penalty={loss.behavior_penalty} must not be negative.")


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{key}={value!r} is unknown: choose one of {', '.join(known)}.")
