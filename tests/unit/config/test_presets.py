"""configs/algorithm/*.yaml and `streamrl.algorithms.PRESETS` are two spellings of the same recipes."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

import configs
from learner.objective.advantages import CRITIC_FREE
from learner.objective.loss_options import check_settings
from learner.objective.surrogate import anchor_of
from streamrl.algorithms import PRESETS
from streamrl.algorithms.presets import Preset
from streamrl.config.load import load_config
from streamrl.config.rules import max_lag
from streamrl.config.schema import Config, OpsmWhen
from streamrl.errors import ConfigError

LOCAL = ("policy.model_path=somewhere",)  # composing reads no model


def as_preset(name: str, config: Config) -> Preset:
    """The recipe that a composed config describes, in the words of a Preset."""
    advantage, loss, scheduler = config.advantage, config.loss, config.policy.scheduler
    critic = advantage.estimator not in CRITIC_FREE
    names = {"dppo_tv": ("bound_low", "bound_high"), "m2po": ("floor_low", "floor_high")}
    low, high = names.get(loss.surrogate, ("eps_low", "eps_high"))
    clipped = loss.surrogate in ("ppo_clip", "decoupled_ppo", *names)
    known = PRESETS[name]
    return Preset(
        name=name, estimator=advantage.estimator, baseline=advantage.baseline, scale=advantage.scale, critic=critic,
        num_critic_steps=config.critic.num_steps, critic_clip=config.critic.clip,
        # what a recipe does when it is given a critic, and inner constants, have no setting of their own
        estimator_with_critic=known.estimator_with_critic, whiten_with_critic=known.whiten_with_critic,
        gamma=advantage.gamma, lam=advantage.lam, rho_bar=advantage.rho_bar, c_bar=advantage.c_bar,
        rho_bar_pg=advantage.rho_bar_pg,
        whiten="batch" if advantage.estimator == "reinforce_pp" else advantage.whiten,
        surrogate=loss.surrogate, anchor=anchor_of(loss.surrogate, loss.anchor),
        **({low: loss.clip_low, high: loss.clip_high} if clipped else {}),
        dual_clip=loss.dual_clip, cap=None if loss.cap == inf else loss.cap, budget=loss.options.get("budget"),
        behavior_penalty=loss.behavior_penalty, aggregation=loss.avg_level, correction=loss.correction,
        veto_low=loss.veto_low, veto_high=loss.veto_high, opsm_delta=loss.opsm_delta,
        opsm_over_budget_only=loss.opsm_when is OpsmWhen.over_budget,
        kl_mode=config.kl.mode, kl_beta=config.kl.coef or 0.0, entropy_coef=loss.entropy_coef,
        filters=("zero_std",) * config.filter.zero_std + ("accuracy",) * (config.filter.accuracy_range is not None),
        overlong_penalty=config.overlong.cache_ratio > 0, overlong_filter=config.filter.truncated,
        lr_rule=scheduler.ess_rule.value, lr_floor=scheduler.ess_floor, eta=config.staleness.eta,
        window=config.staleness.num_lookahead_groups,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_group_says_what_the_preset_says_and_is_accepted(name):
    config = load_config([f"algorithm={name}", *LOCAL])
    check_settings(config.advantage, config.loss, max_lag=max_lag(config))

    assert as_preset(name, config) == PRESETS[name]
    assert max_lag(config) == PRESETS[name].max_lag


def test_there_is_a_config_group_for_every_preset_and_only_one_more():
    files = {path.stem for path in (Path(configs.__file__).parent / "algorithm").glob("*.yaml")}
    assert files == {*PRESETS, "uncorrected"}  # the negative control is no recipe


def test_a_misspelt_recipe_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match="(?s)algorithm.*stream_default"):
        load_config(["algorithm=stream_defalt", *LOCAL])
