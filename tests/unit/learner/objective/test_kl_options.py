"""Settings of KL, entropy and constraints that cannot work, or would do nothing, are refused by name."""

import pytest

from learner.objective.options import check_regularizers
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.errors import ConfigError

BASE = to_plain(load_config(["experiment=quickstart"]))
K2 = "kl.mode=k2_is"
CAPPED = "constraint.kl_limit=0.1"


def checked(*words: str, max_lag: int = 2):
    config = from_plain(BASE, words)
    check_regularizers(
        config.kl, config.reference, config.entropy, config.constraint, config.loss, max_lag=max_lag
    )
    return config


@pytest.mark.parametrize(
    "words",
    [
        [], [K2], ["kl.mode=off"], ["kl.mode=k1_is"], ["kl.mode=k3_is"], ["kl.mode=reward_k1", "kl.coef=0.01"],
        ["kl.mode=advantage"], ["kl.mode=k3", "kl.allow_biased=true"], ["kl.mode=k2", "kl.allow_biased=true"],
        [K2, "kl.controller=pid", "kl.options.target=0.02", "kl.options.kp=0.5"],
        [K2, "kl.controller=horizon", "kl.options.horizon=10000"],
        [K2, "kl.controller=schedule", "kl.options.kind=linear", "kl.options.num_steps=50"],
        [K2, "kl.coef=0", "kl.controller=pid", "kl.options.low=0"],
        [K2, "reference.sync_every_steps=5", "kl.cap=4"],
        [CAPPED, "kl.cap=3", "reference.sync_every_steps=5"],
        ["constraint.entropy_min=0.3", "constraint.method=pid", "constraint.options.kp=1", "constraint.one_sided=true"],
        [CAPPED, "constraint.method=penalty", "constraint.options.weight=5"],
        ["entropy.target=0.3", "entropy.adapt=coef"], ["entropy.target=0.3", "entropy.adapt=clip_high"],
        ["kl.mode=advantage", "loss.surrogate=reinforce", "loss.allow_uncorrected=true", "kl.cap=3"],
    ],
)
def test_settings_that_work_together_are_taken(words):
    checked(*words)


@pytest.mark.shows("kl.allow_biased")
@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_a_loss_for_samples_of_the_policy_itself_needs_fresh_data(kind):
    checked(f"kl.mode={kind}", max_lag=0)
    with pytest.raises(ConfigError, match="use k2_is"):
        checked(f"kl.mode={kind}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["kl.mode=reward_k3"], "the mean derivative of k1 alone is 0. Take reward_k1, or k2_is or k3_is in the loss"),
        (["kl.mode=k4"], "kl.mode='k4' is unknown: choose one of off, reward_k1, advantage"),
        ([K2, "kl.controller=auto"], "kl.controller='auto' is unknown"),
        (["kl.mode=k3"], "allow_biased=true"),
        ([K2, "kl.allow_biased=true"], "kl.allow_biased=true does nothing"),
        (["kl.coef=0.1"], "kl.coef=0.1 does nothing with kl.mode=off"),
        (["kl.controller=pid"], "kl.controller=pid does nothing with kl.mode=off"),
        (["kl.options.target=0.1"], "kl.options={'target': 0.1} does nothing with kl.mode=off"),
        ([K2, "kl.coef=0"], "kl.coef=0.0 never pulls"),
        ([K2, "kl.options.target=0.1"], "kl.options.target is no knob of kl.controller=constant: it has none"),
        ([K2, "kl.controller=linear", "kl.options.gain=1"], "kl.options.gain is no knob .* it has factor, high, low"),
        ([K2, "kl.controller=linear", "kl.options.target=often"], "kl.options.target='often' must be a number"),
        ([K2, "kl.controller=linear", "kl.options.target=0"], "kl.options: target=0 must be positive"),
        ([K2, "kl.controller=linear", "kl.options.high=0.1"], "kl.coef=0.2 starts outside .* kl.options.high=0.1"),
        ([K2, "kl.controller=horizon"], "needs kl.options.horizon"),
        ([K2, "kl.controller=schedule", "kl.options.kind=sine"], "kind='sine'"),
        ([K2, "kl.controller=schedule", "kl.options.start=1"], "kl.options.start is no knob"),
        (["kl.mode=k3_is", "kl.cap=3"], "kl.cap=3.0 does nothing"),
        (["kl.mode=advantage", "kl.cap=3"], "kl.cap=3.0 does nothing"),
        ([K2, "kl.cap=0"], "kl.cap=0 must be greater than 0"),
        (["reference.sync_every_steps=5"], "reference.sync_every_steps=5 does nothing without"),
        (["reference.model_path=/x"], "reference.model_path=/x does nothing without"),
        (["constraint.entropy_min=0.1", "reference.sync_every_steps=5"], "does nothing without"),
        ([K2, "reference.sync_every_steps=-1"], "sync_every_steps=-1 must be at least 0"),
        (["entropy.target=0.3"], "entropy.target=0.3 does nothing with entropy.adapt=none"),
        (["entropy.step=0.3"], "entropy.step=0.3 does nothing"),
        (["entropy.adapt=coef"], "needs entropy.target"),
        (["entropy.adapt=coef", "entropy.target=1", "entropy.step=0"], "entropy.step=0 must be greater than 0"),
        (["entropy.adapt=coef", "entropy.target=1", "entropy.low=2"], "low < high"),
        (["entropy.adapt=coef", "entropy.target=1", "entropy.low=0.1"], "loss.entropy_coef=0.0 starts outside"),
        (["entropy.adapt=clip_high", "entropy.target=1", "loss.clip_high=0.7"], "loss.clip_high=0.7 starts outside"),
        (["entropy.adapt=clip_high", "entropy.target=1", "loss.surrogate=tis"], "which has no upper clip"),
        (["constraint.method=pid"], "constraint.method=pid does nothing without"),
        (["constraint.one_sided=true"], "constraint.one_sided=True does nothing without"),
        (["constraint.options.lr=1"], "does nothing without"),
        (["constraint.kl_limit=0"], "constraint.kl_limit=0 must be greater than 0"),
        ([CAPPED, "constraint.options.kp=1"], "constraint.options.kp is no knob of constraint.method=lagrangian"),
        ([CAPPED, "constraint.options.high=-1"], "high=-1"),
        ([CAPPED, "constraint.method=penalty", "constraint.one_sided=true"], "which always is"),
        ([CAPPED, "constraint.method=penalty", "constraint.options.weight=0"], "must be positive"),
    ],
)
def test_what_cannot_work_or_does_nothing_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        checked(*words)


def test_an_off_that_yaml_reads_as_false_is_still_off():
    assert from_plain({"kl": {"mode": False}, "policy": {"tiny": {"enabled": True}}}).kl.mode == "off"
