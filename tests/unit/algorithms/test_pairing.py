"""One importance weight per term; the tables of names; the presets."""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest

import streamrl.algorithms as alg

STALE = {"max_lag": 4}


def test_the_tables_hold_the_promised_names():
    assert list(alg.ESTIMATORS) == [
        "group", "reinforce_pp", "vtrace", "vtrace_segments", "vtrace_critic_free", "retrace_v", "retrace_q", "gae",
        "td_lambda", "n_step", "clipped_is",
    ]  # fmt: skip
    assert sorted(alg.SURROGATES) == sorted(
        "reinforce ppo_clip decoupled_ppo tis cispo aipo seq_tis mis gspo gmpo topr sapo vespo m2po dppo_tv dppo_kl "
        "icepop dis".split()
    )
    for table in (alg.ESTIMATORS, alg.SURROGATES):
        assert all(callable(function) for function in table.values())
        with pytest.raises(TypeError):
            table["mine"] = print


@pytest.mark.parametrize("surrogate", [name for name in alg.SURROGATES if name != "reinforce"])
@pytest.mark.parametrize("estimator", alg.ESTIMATORS)
def test_25_every_surrogate_with_a_ratio_fits_every_estimator_without_one(estimator, surrogate):
    if estimator == "clipped_is":
        with pytest.raises(ValueError, match="more than once.*clipped_is"):
            alg.check_pairing(estimator, surrogate)
    else:
        alg.check_pairing(estimator, surrogate, **STALE)


@pytest.mark.parametrize("surrogate", [name for name in alg.SURROGATES if name != "reinforce"])
@pytest.mark.parametrize("estimator", ["vtrace", "vtrace_segments", "vtrace_critic_free"])
def test_25_a_ratio_in_the_estimator_refuses_a_second_one_even_when_uncorrected_is_allowed(estimator, surrogate):
    with pytest.raises(ValueError, match="more than once"):
        alg.check_pairing(estimator, surrogate, rho_bar_pg=1.0, allow_uncorrected=True)
    alg.check_pairing(estimator, "reinforce", anchor="none", rho_bar_pg=1.0, **STALE)


@pytest.mark.parametrize("estimator", [name for name in alg.ESTIMATORS if name != "clipped_is"])
def test_25_no_ratio_at_all_is_refused_on_stale_data(estimator):
    with pytest.raises(ValueError, match="nothing applies.*max_lag=1"):
        alg.check_pairing(estimator, "reinforce", max_lag=1)

    alg.check_pairing(estimator, "reinforce", max_lag=0)
    alg.check_pairing(estimator, "reinforce", max_lag=9, allow_uncorrected=True)


def test_25_clipped_is_fits_reinforce_only():
    alg.check_pairing("clipped_is", "reinforce", **STALE)
    with pytest.raises(ValueError, match="more than once"):
        alg.check_pairing("clipped_is", "reinforce", correction="bypass_pg_is")


@pytest.mark.parametrize("name, spec", alg.CORRECTION_PRESETS.items())
def test_25_corrections_with_reinforce(name, spec):
    if spec.mode == "bypass" and spec.weight != "none":
        alg.check_pairing("group", "reinforce", correction=name, **STALE)
    else:
        with pytest.raises(ValueError, match="nothing applies"):
            alg.check_pairing("group", "reinforce", correction=name, **STALE)


@pytest.mark.parametrize("name, spec", alg.CORRECTION_PRESETS.items())
def test_25_corrections_with_a_clip_on_mu(name, spec):
    if spec.weight == "none":
        alg.check_pairing("group", "ppo_clip", correction=name, **STALE)
    else:
        with pytest.raises(ValueError, match=f"more than once.*{name}"):
            alg.check_pairing("group", "ppo_clip", correction=name, **STALE)


@pytest.mark.parametrize("anchor", ["recomputed", "loglinear", "ewma"])
@pytest.mark.parametrize("name, spec", alg.CORRECTION_PRESETS.items())
def test_25_corrections_with_a_clip_on_a_proximal_policy(name, spec, anchor):
    if spec.mode == "decoupled" and spec.weight != "none":
        alg.check_pairing("group", "ppo_clip", anchor=anchor, correction=name, **STALE)
    elif spec.weight != "none":
        with pytest.raises(ValueError, match="more than once"):
            alg.check_pairing("group", "ppo_clip", anchor=anchor, correction=name, **STALE)
    else:
        with pytest.raises(ValueError, match="nothing applies the whole ratio"):
            alg.check_pairing("group", "ppo_clip", anchor=anchor, correction=name, **STALE)


@pytest.mark.parametrize("anchor", ["behavior", "recomputed", "loglinear", "ewma"])
def test_25_decoupled_ppo_brings_both_halves(anchor):
    alg.check_pairing("group", "decoupled_ppo", anchor=anchor, **STALE)
    with pytest.raises(ValueError, match="more than once"):
        alg.check_pairing("group", "decoupled_ppo", anchor=anchor, correction="decoupled_token_is")


@pytest.mark.parametrize(
    "surrogate", [n for n in alg.SURROGATES if n not in ("ppo_clip", "decoupled_ppo", "reinforce")]
)
def test_other_surrogates_divide_by_the_recorded_log_prob_only(surrogate):
    with pytest.raises(ValueError, match="recorded behavior"):
        alg.check_pairing("group", surrogate, anchor="recomputed")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("group", "ppo"), "unknown surrogate 'ppo'"),
        (("vtrac", "ppo_clip"), "unknown estimator 'vtrac'"),
    ],
)
def test_unknown_names_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        alg.check_pairing(*arguments)
    with pytest.raises(ValueError, match="unknown correction"):
        alg.check_pairing("group", "ppo_clip", correction="mine")
    with pytest.raises(ValueError, match="unknown anchor"):
        alg.check_pairing("group", "ppo_clip", anchor="mine")
    with pytest.raises(ValueError, match="anchor='none'"):
        alg.check_pairing("group", "ppo_clip", anchor="none")
    with pytest.raises(ValueError, match="rho_bar_pg=1.0 does nothing"):
        alg.check_pairing("gae", "reinforce", rho_bar_pg=1.0)


def test_the_verdict_of_every_combination_is_a_count_of_halves():
    """An independent count over all combinations: each half of mu -> prox -> pi exactly once, or refused."""
    ratio_free = {"reinforce"}
    for estimator, surrogate, anchor, correction in itertools.product(
        alg.ESTIMATORS, ("reinforce", "ppo_clip", "tis", "decoupled_ppo"), ("behavior", "recomputed"),
        alg.CORRECTION_PRESETS,
    ):  # fmt: skip
        if surrogate == "tis" and anchor != "behavior":
            continue
        first = second = 0
        if estimator == "clipped_is":
            first, second = 1, 1
        if surrogate == "ppo_clip" and anchor == "recomputed":
            second += 1
        elif surrogate not in ratio_free:
            first, second = first + 1, second + 1
        spec = alg.CORRECTION_PRESETS[correction]
        if spec.weight != "none":
            first += 1
            second += spec.mode == "bypass"

        def verdict(c=(estimator, surrogate), a=anchor, k=correction):
            try:
                alg.check_pairing(*c, anchor=a, correction=k, max_lag=2)
            except ValueError:
                return False
            return True

        assert verdict() == (first == 1 and second == 1), (estimator, surrogate, anchor, correction)


# Presets


def test_the_presets_are_the_thirteen_of_the_table():
    assert list(alg.PRESETS) == [
        "stream_default", "impala", "areal", "prime", "scalerl", "low_bias", "extreme_lag",
        "dr_grpo", "grpo", "dapo", "ppo", "rloo", "reinforce_pp",
    ]  # fmt: skip
    assert all(alg.preset(name) is recipe and recipe.name == name for name, recipe in alg.PRESETS.items())


# Each column of the specification's two tables, in the order of the presets above.
COLUMNS = {
    "estimator": "group vtrace group group group group group group group group gae group reinforce_pp",
    "baseline": "leave_one_out none group_mean group_mean group_mean opob leave_one_out group_mean group_mean "
    "group_mean none leave_one_out none",
    "scale": "none none std none batch_std none none none std std none none none",
    "critic": "0 1 0 0 0 0 0 0 0 0 1 0 0",
    "whiten": "none none none none none none none none none none batch none batch",
    "surrogate": "ppo_clip reinforce decoupled_ppo dppo_tv cispo seq_tis m2po ppo_clip ppo_clip ppo_clip ppo_clip tis "
    "ppo_clip",
    "anchor": "behavior none recomputed behavior behavior behavior behavior behavior behavior behavior behavior "
    "behavior behavior",
    "eps_low": "0.2 - 0.2 - - - - 0.2 0.2 0.2 0.2 - 0.2",
    "eps_high": "0.28 - 0.2 - - - - 0.2 0.2 0.28 0.2 - 0.2",
    "dual_clip": "3.0 - - - - - - - - - - - -",
    "cap": "- - 5.0 - 5.0 8.0 - - - - - 2.0 -",
    "behavior_penalty": "0.0 0.0 0.0 0.001 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0",
    "veto_low": "0.0001 - - - - 0.0001 0.0001 - - - - - -",
    "veto_high": "100.0 - - - - 100.0 100.0 - - - - - -",
    "opsm_delta": "0.5 - - - - - - - - - - - -",
    "aggregation": "token-mean token-mean token-mean token-mean prompt-mean seq-mean-token-sum-norm token-mean "
    "seq-mean-token-sum-norm seq-mean-token-mean token-mean token-mean seq-mean-token-sum token-mean",
    "kl_mode": "off off off off off off off off k3_is off reward_k1 reward_k1 reward_k1",
    "kl_beta": "0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.01 0.0 0.001 0.001 0.001",
    "filters": "zero_std - - zero_std zero_std zero_std zero_std zero_std - zero_std,accuracy - - -",
    "overlong_penalty": "0 0 0 0 0 0 0 0 0 1 0 0 0",
    "overlong_filter": "0 0 0 0 0 0 0 0 0 1 0 0 0",
    "lr_rule": "sqrt none none none none sqrt none none none none none none none",
    "eta": "4 1 4 8 8 8 64 1 1 1 1 1 1",
    "correction": " ".join(["disabled"] * 13),
    "gamma": " ".join(["1.0"] * 13),
    "rho_bar": " ".join(["1.0"] * 13),
    "c_bar": " ".join(["1.0"] * 13),
    "entropy_coef": " ".join(["0.0"] * 13),
    "lr_floor": " ".join(["0.1"] * 13),
}


def shown(value):
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("field", COLUMNS)
def test_each_row_of_the_preset_tables(field):
    assert [shown(getattr(recipe, field)) for recipe in alg.PRESETS.values()] == COLUMNS[field].split()


def test_the_remaining_cells_of_the_preset_tables():
    impala, ppo, default = alg.preset("impala"), alg.preset("ppo"), alg.preset("stream_default")

    assert (impala.num_critic_steps, impala.lam, impala.rho_bar_pg) == (2, 1.0, 1.0)
    assert (ppo.num_critic_steps, ppo.lam, ppo.critic_clip, ppo.rho_bar_pg) == (1, 0.95, 0.5, None)
    assert (default.estimator_with_critic, default.whiten_with_critic) == ("vtrace", "batch")
    assert default.opsm_over_budget_only
    prime, extreme = alg.preset("prime"), alg.preset("extreme_lag")
    assert (prime.bound_low, prime.bound_high) == (0.2, 0.2)
    assert (extreme.budget, extreme.floor_low, extreme.floor_high) == (0.04, 0.3, 0.5)
    assert (alg.preset("dapo").accuracy_low, alg.preset("dapo").accuracy_high) == (0.01, 0.99)
    assert alg.preset("grpo").scale_eps == 1e-6


@pytest.mark.parametrize("name", alg.PRESETS)
def test_25_every_preset_passes_the_pairing_at_its_own_lag(name):
    recipe = alg.preset(name)

    assert recipe.max_lag == recipe.eta + 1
    for estimator in {recipe.estimator, recipe.estimator_with_critic or recipe.estimator}:
        alg.check_pairing(
            estimator,
            recipe.surrogate,
            anchor=recipe.anchor,
            correction=recipe.correction,
            rho_bar_pg=recipe.rho_bar_pg,
            max_lag=recipe.max_lag,
        )


@pytest.mark.parametrize("name", alg.PRESETS)
def test_a_preset_gives_its_surrogate_knobs_that_it_accepts(name):
    recipe = alg.preset(name)

    knobs = recipe.surrogate_knobs()

    assert set(knobs) <= set(inspect.signature(alg.SURROGATES[recipe.surrogate]).parameters)
    set_on_preset = {
        field
        for field in ("eps_low", "eps_high", "dual_clip", "cap", "bound_low", "bound_high", "budget", "floor_low")
        if getattr(recipe, field) is not None
    }
    assert set_on_preset <= set(knobs)
    assert (None in knobs.values()) == (name == "prime")  # its DPPO ratio is explicitly uncapped


def test_an_unknown_preset_is_answered_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'dr_grpo'"):
        alg.preset("dr_grp")
    with pytest.raises(ValueError, match="expected one of stream_default"):
        alg.preset("zzzzzz")


def test_a_preset_can_be_varied_without_touching_the_table():
    mine = dataclasses.replace(alg.preset("dapo"), eta=3)

    assert mine.max_lag == 4
    assert alg.preset("dapo").eta == 1
