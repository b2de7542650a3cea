"""One importance weight per term, and the tables of names."""

import itertools

import pytest

import streamrl.algorithms as alg
from tests.kit.each import each

STALE = {"max_lag": 4}


def test_the_tables_hold_the_promised_names():
    assert set(alg.ESTIMATORS) >= {
        "group", "reinforce_pp", "vtrace", "vtrace_segments", "vtrace_critic_free", "retrace_v", "retrace_q", "gae",
        "td_lambda", "n_step", "clipped_is", "optimal",
    }  # fmt: skip
    assert set(alg.SURROGATES) >= set(
        "reinforce ppo_clip decoupled_ppo tis cispo aipo seq_tis mis gspo gmpo topr sapo vespo m2po dppo_tv dppo_kl "
        "icepop dis oapl flash_reinforce".split()
    )
    for table in (alg.ESTIMATORS, alg.SURROGATES):
        assert all(callable(function) for function in table.values())
        with pytest.raises(TypeError):
            table["mine"] = print


@each("surrogate", [name for name in alg.SURROGATES if name != "reinforce"])
@pytest.mark.parametrize("estimator", alg.ESTIMATORS)
def test_25_every_surrogate_with_a_ratio_fits_every_estimator_without_one(estimator, surrogate):
    if estimator == "clipped_is":
        with pytest.raises(ValueError, match="more than once.*clipped_is"):
            alg.check_pairing(estimator, surrogate)
    else:
        alg.check_pairing(estimator, surrogate, **STALE)


@each("surrogate", [name for name in alg.SURROGATES if name != "reinforce"])
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
        (("group", "ppo"), "loss.surrogate=ppo is unknown. Did you mean dppo_tv"),
        (("vtrac", "ppo_clip"), "advantage.estimator=vtrac is unknown. Did you mean vtrace"),
    ],
)
def test_unknown_names_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        alg.check_pairing(*arguments)
    with pytest.raises(ValueError, match="loss.correction=mine is unknown"):
        alg.check_pairing("group", "ppo_clip", correction="mine")
    with pytest.raises(ValueError, match="unknown anchor"):
        alg.check_pairing("group", "ppo_clip", anchor="mine")
    with pytest.raises(ValueError, match="anchor='none'"):
        alg.check_pairing("group", "ppo_clip", anchor="none")
    with pytest.raises(ValueError, match="rho_bar_pg=1.0 does nothing"):
        alg.check_pairing("gae", "reinforce", rho_bar_pg=1.0)


def test_every_combination_is_accepted_by_a_count_of_halves():
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

        def accepted(c=(estimator, surrogate), a=anchor, k=correction):
            try:
                alg.check_pairing(*c, anchor=a, correction=k, max_lag=2)
            except ValueError:
                return False
            return True

        assert accepted() == (first == 1 and second == 1), (estimator, surrogate, anchor, correction)
