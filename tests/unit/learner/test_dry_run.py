"""The dry run: what cannot train is refused before a model is loaded, in the words of the part that uses it."""

from pathlib import Path

import pytest

import configs
from learner.hub_client.settings import answer_limit, limits, response_limit
from learner.setup.preflight import check_losses
from streamrl.algorithms import ESTIMATORS, SURROGATE_ENTRIES
from streamrl.config.load import load_config
from streamrl.errors import ConfigError

RECIPES = sorted(path.stem for path in (Path(configs.__file__).parent / "algorithm").glob("*.yaml"))


def config_of(*words: str):
    return load_config(["policy.model_path=somewhere", *words])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_the_dry_run(name):
    check_losses(config_of(f"algorithm={name}", *(["distill.teacher=elsewhere"] if name == "distill" else [])))


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"reinforce_pp", "clipped_is"}))
@pytest.mark.parametrize("surrogate", sorted(set(SURROGATE_ENTRIES) - {"reinforce"}))
def test_what_may_be_paired_computes_a_loss(estimator, surrogate):
    words = [f"advantage.estimator={estimator}", f"loss.surrogate={surrogate}"]
    if SURROGATE_ENTRIES[surrogate].whole_row:
        words.append("loss.avg_level=seq-mean-token-mean")
    if SURROGATE_ENTRIES[surrogate].max_clip is not None:
        words += ["loss.clip_low=3e-4", "loss.clip_high=4e-4"]
    try:
        check_losses(config_of(*words))
    except ConfigError as refusal:
        assert "advantage.estimator and loss.surrogate: " in str(refusal), "only a pairing may be wrong here"


@pytest.mark.parametrize(
    "words",
    [
        ("loss.zscore_bound=2",), ("advantage.baseline=opob",), ("loss.surrogate=decoupled_ppo", "loss.anchor=ewma"),
        ("kl.mode=k3_is", "kl.coef=0.1"),
    ],
)
def test_parts_that_ordinary_runs_never_touch_compute_too(words):
    check_losses(config_of(*words))


def test_answers_are_measured_by_what_training_may_sample_and_not_by_what_is_admitted():
    words = ("rollout.train.sampling.max_new_tokens=64", "rollout.test.sampling.max_new_tokens=512")
    one, two = config_of(*words), config_of(*words, "env.max_turns=2")

    assert (answer_limit(one), response_limit(one)) == (64, 512)
    assert answer_limit(two) == 128 and response_limit(two) >= 1024


def test_a_long_evaluation_does_not_make_the_hub_wait_longer_for_stuck_training_leases():
    given = limits(config_of("eval.datasets={long: {sampling: {max_new_tokens: 32768}}}",
                             "rollout.train.sampling.max_new_tokens=1024"), 64)
    assert (given.progress_deadline_s, given.eval_progress_deadline_s) == (512.0, 16384.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("loss.surrogate=decoupled_ppo", "loss.anchor=behavior"), "needs a proximal policy"),
        (("loss.dual_clip=0.5",), "dual_clip=0.5 must exceed 1"),
        (("loss.options.ratio_cap=1.1",), "ratio_cap=1.1 must exceed"),
        (("advantage.estimator=vtrace", "loss.surrogate=tis", "advantage.options.leak=2"), "leak=2 must lie in"),
        (("advantage.estimator=n_step", "advantage.options.n=0"), "n=0 must be at least 1"),
        (("loss.surrogate=m2po", "loss.options.budget=-1"), "budget=-1 must not be negative"),
        (("critic.num_warmup_steps=5",), "critic.num_warmup_steps=5 does nothing"),
        (("loss.ewma_decay=0.5",), "loss.ewma_decay=0.5 does nothing"),
        (("advantage.weight_cap=5",), "advantage.weight_cap=5.0 does nothing"),
        (("advantage.segment_tokens=7",), "advantage.segment_tokens=7 does nothing"),
        (("loss.veto_low=null", "loss.veto_high=null", "loss.veto_stat=mean"), "loss.veto_stat=mean does nothing"),
        (
            ("algorithm=areal", "learner.num_minibatches=1", "entropy.adapt=clip_high", "entropy.target=0.2"),
            "the policy is its own anchor",
        ),
    ],
)
def test_what_would_fail_or_do_nothing_in_training_is_refused_at_the_start(words, message):
    with pytest.raises(ConfigError, match=message):
        check_losses(config_of(*words))


def test_a_clip_that_a_controller_may_move_too_far_is_refused_before_it_moves():
    words = ("entropy.adapt=clip_high", "entropy.target=0.2", "loss.options.ratio_cap=1.4")
    check_losses(config_of(*words, "entropy.high=0.39"))
    with pytest.raises(ConfigError, match="ratio_cap=1.4 must exceed"):
        check_losses(config_of(*words, "entropy.high=0.5"))
