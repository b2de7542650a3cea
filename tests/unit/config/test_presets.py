"""configs/algorithm/*.yaml, cell by cell: what each recipe sets, and that every one is accepted."""

from __future__ import annotations

import math
from enum import Enum
from operator import attrgetter
from pathlib import Path

import pytest

import configs
from learner.objective.options import check_settings
from learner.setup.preflight import check_losses, idle_settings, unguarded_settings
from streamrl.algorithms.registry import ESTIMATOR_ENTRIES, find_estimator
from streamrl.config.load import OWNED, load_config
from streamrl.config.rules import max_lag
from streamrl.errors import ConfigError

LOCAL = ("policy.model_path=somewhere",)  # composing reads no model

RECIPES = [
    "stream_default", "impala", "areal", "prime", "scalerl", "low_bias", "extreme_lag", "dr_grpo", "grpo", "dapo",
    "ppo", "rloo", "reinforce_pp", "vtrace", "retrace", "trajectory_balance",
    "sao", "single_rollout", "distill", "sao_gae", "flash_reinforce", "oapl",
]

# Each column of the specification's two tables, in the order of the recipes above; "-" is unset.
COLUMNS = {
    "advantage.estimator": "group vtrace group group group group group group group group gae group reinforce_pp "
    "vtrace retrace_v group vtrace group group gae group optimal",
    "advantage.baseline": "leave_one_out none group_mean group_mean group_mean opob leave_one_out group_mean "
    "group_mean group_mean none leave_one_out none none none group_mean none batch none none batch leave_one_out",
    "advantage.scale": "none none std none batch_std none none none std std none none none none none none none none "
    "none none none none",
    "advantage.whiten": "none none none none none none none none none none batch none none none none none batch "
    "none none none none none",
    "advantage.gamma": " ".join(["1.0"] * 22),
    "advantage.lam": "1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 0.95 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0 1.0",
    "advantage.rho_bar": " ".join(["1.0"] * 22),
    "advantage.c_bar": " ".join(["1.0"] * 22),
    "advantage.rho_bar_pg": "- 1.0 - - - - - - - - - - - 1.0 - - - - - - - -",
    "critic.num_steps": "1 2 1 1 1 1 1 1 1 1 1 1 1 8 8 1 8 1 1 2 1 1",
    "critic.clip": "- - - - - - - - - - 0.5 - - - - - - - - - - -",
    "loss.surrogate": "ppo_clip reinforce decoupled_ppo dppo_tv cispo seq_tis m2po ppo_clip ppo_clip ppo_clip "
    "ppo_clip tis ppo_clip reinforce ppo_clip reinforce ppo_clip ppo_clip tis dis flash_reinforce oapl",
    "loss.anchor": "- - recomputed - - - - - - - - - - - - - - - - - - -",
    "loss.dual_clip": "3.0 - - - - - - - - - - - - - 3.0 - 3.0 3.0 - - - -",
    "loss.cap": "- - 5.0 inf 5.0 8.0 - - - - - 2.0 - - - - - - 2.0 - - -",
    "loss.behavior_penalty": "0.0 0.0 0.0 0.001 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 "
    "0.0",
    "loss.veto_low": "0.0001 - - - - 0.0001 0.0001 - - - - - - - - - 0.0001 0.0001 - - - -",
    "loss.veto_high": "100.0 - - - - 100.0 100.0 - - - - - - - - - 100.0 100.0 - - - -",
    "loss.opsm_delta": "0.5 - - - - - - - - - - - - 0.05 - - - 0.5 - - - -",
    "loss.avg_level": "token-mean token-mean token-mean token-mean prompt-mean seq-mean-token-sum-norm token-mean "
    "seq-mean-token-sum-norm seq-mean-token-mean token-mean token-mean seq-mean-token-sum token-mean token-mean "
    "token-mean seq-mean-token-sum token-mean token-mean token-mean token-mean seq-mean-token-mean "
    "seq-mean-token-mean",
    "loss.correction": " ".join(["disabled"] * 22),
    "loss.entropy_coef": " ".join(["0.0"] * 22),
    "kl.mode": "off off off off off off off off k3_is off reward_k1 reward_k1 reward_k1 off off reward_k1 off off "
    "off off off off",
    "kl.coef": "- - - - - - - - 0.01 - 0.001 0.001 0.001 - - 0.01 - - - - - -",
    "filter.zero_std": "True False False True True True True True False True False False False False False False "
    "False False False False False False",
    "filter.truncated": "False False False False False False False False False True False False False False False "
    "False False False False False False False",
    "overlong.cache_ratio": "0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.2 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0",
    "policy.scheduler.ess_rule": "sqrt none none none none sqrt none none none none none none none sqrt sqrt none "
    "sqrt sqrt none none none none",
    "policy.scheduler.ess_floor": " ".join(["0.1"] * 22),
    "staleness.eta": "4 1 4 8 8 8 64 1 1 1 1 1 1 4 4 4 4 4 1 4 4 4",
    "learner.num_minibatches": "1 1 4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "learner.num_epochs": " ".join(["1"] * 22),
    "staleness.num_lookahead_groups": "- - - - - - - - - - - - - - - - - - - - - -",
}
CLIPS = {  # of the recipes whose surrogate reads them
    "stream_default": (0.2, 0.28), "areal": (0.2, 0.2), "prime": (0.2, 0.2), "extreme_lag": (0.3, 0.5),
    "dr_grpo": (0.2, 0.2), "grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "ppo": (0.2, 0.2), "reinforce_pp": (0.2, 0.2),
    "retrace": (0.2, 0.28), "sao": (0.2, 0.28), "single_rollout": (0.2, 0.28), "sao_gae": (0.8, 3.0),
}


def shown(value: object) -> str:
    value = value.value if isinstance(value, Enum) else value
    return "-" if value is None else str(value)


@pytest.fixture(scope="module")
def recipes():
    return {name: load_config([f"algorithm={name}", *LOCAL]) for name in RECIPES}


@pytest.mark.parametrize("setting", COLUMNS)
def test_each_row_of_the_preset_tables(recipes, setting):
    assert [shown(attrgetter(setting)(config)) for config in recipes.values()] == COLUMNS[setting].split()


def test_the_remaining_cells_of_the_preset_tables(recipes):
    assert {name: (recipes[name].loss.clip_low, recipes[name].loss.clip_high) for name in CLIPS} == CLIPS
    assert recipes["stream_default"].loss.opsm_when.value == "over_budget"
    assert dict(recipes["extreme_lag"].loss.options) == {"budget": 0.04}
    assert recipes["dapo"].filter.accuracy_range == [0.01, 0.99]
    assert {recipes[name].critic.optimizer.lr for name in ("vtrace", "retrace", "sao")} == {3e-3}
    single = {name for name in RECIPES if recipes[name].rollout.num_responses_per_prompt == 1}
    assert single == {"ppo", "sao", "single_rollout", "sao_gae", "flash_reinforce"}
    whole = recipes["sao_gae"].critic
    assert (whole.num_warmup_steps, whole.frozen, whole.optimizer.lr) == (10, ["self_attn"], 5e-6)
    assert math.isinf(recipes["prime"].loss.cap)  # its DPPO ratio is explicitly uncapped


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_the_pairing_at_its_own_lag(recipes, name):
    config = recipes[name]
    steps = config.learner.num_minibatches
    assert max_lag(config) == steps * (config.staleness.eta + 2) - 1

    check_settings(config.advantage, config.loss, max_lag=max_lag(config), steps_per_batch=steps)


def test_the_config_group_holds_the_recipes_and_the_negative_control():
    files = {path.stem for path in (Path(configs.__file__).parent / "algorithm").glob("*.yaml")}
    assert files == {*RECIPES, "uncorrected"}


def test_a_misspelt_recipe_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match="(?s)algorithm.*stream_default"):
        load_config(["algorithm=stream_defalt", *LOCAL])


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["algorithm=impala", "staleness.force=24"], True), (["algorithm=impala", "staleness.eta=24"], True),
        (["algorithm=impala", "staleness.eta=4"], False), (["algorithm=vtrace", "staleness.eta=24"], False),
        (["algorithm=retrace", "staleness.eta=24"], False), (["algorithm=ppo", "staleness.eta=24"], False),
        (["algorithm=uncorrected", "staleness.eta=24"], False),
        (["algorithm=impala", "staleness.eta=24", "loss.veto_low=1e-4"], False),
    ],
)
def test_a_critic_without_a_guard_is_warned_of_on_old_data(words, warned):
    assert bool(unguarded_settings(load_config([*words, *LOCAL]))) is warned


@pytest.mark.parametrize("name", [*RECIPES, "uncorrected"])
def test_no_recipe_sets_what_it_does_not_read(name):
    assert idle_settings(load_config([f"algorithm={name}", "experiment=quickstart"])) == []


@pytest.mark.parametrize(("word", "reading"), [
    ("loss.clip_low=0.1", "algorithm=ppo"), ("loss.clip_high=0.4", "algorithm=dapo"),
    ("loss.dual_clip=4.0", "algorithm=grpo"), ("critic.optimizer.lr=0.0001", "algorithm=ppo"),
    ("critic.scheduler.name=linear", "algorithm=retrace"),
    ("staleness.adaptive.ess_target=0.6", "staleness.adaptive.enabled=true"),
    ("staleness.adaptive.max_eta=8", "staleness.adaptive.enabled=true"),
])
def test_a_word_that_nothing_reads_is_told(word, reading):
    """The same word is read by another recipe, and then not told."""
    words = ["experiment=quickstart", "staleness.eta=2", word]
    other = ["algorithm=trajectory_balance"] if "adaptive" not in reading else []

    assert idle_settings(load_config([*words, *other])) == [word]
    assert idle_settings(load_config([*words, reading])) == []


@pytest.mark.parametrize(("word", "key"), [
    ("kl.mode=off", "kl.coef"), ("loss.opsm_delta=null", "loss.opsm_when"), ("loss.surrogate=ppo_clip", "loss.cap"),
    ("loss.surrogate=ppo_clip", "loss.options.budget"), ("advantage.estimator=group", "critic.num_steps"),
    ("advantage.estimator=gae", "advantage.rho_bar_pg"),
])
def test_a_recipes_own_value_refuses_no_word_of_the_command_line(word, key):
    num_left_out = 0
    for recipe in set(RECIPES) - {"distill"}:  # which needs a teacher
        said: list[str] = []
        config = load_config([*LOCAL, f"algorithm={recipe}", word, "loss.allow_uncorrected=true"], notify=said.append)
        if not any(line.startswith(f"{word} leaves out the recipe's {key}=") for line in said):
            continue
        num_left_out += 1
        try:
            check_losses(config)
        except ConfigError as error:  # of what is typed, such as a loss without any weight
            assert "does nothing" not in str(error) and " holds [" not in str(error), recipe
    assert num_left_out


def test_what_is_typed_beside_it_is_refused_as_before():
    with pytest.raises(ConfigError, match="kl.coef=0.5 does nothing with kl.mode=off"):
        check_losses(load_config([*LOCAL, "algorithm=ppo", "kl.mode=off", "kl.coef=0.5"]))


def test_the_estimators_that_take_a_recipes_critic_away_are_those_that_read_no_values():
    without = [name for switch, name, owned in OWNED if switch == "advantage.estimator" and "critic" in owned]
    assert without == [name for name in ESTIMATOR_ENTRIES if not find_estimator(name).needs_critic]
