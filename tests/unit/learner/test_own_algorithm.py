"""Own estimators and surrogates: what they may return, and one sentence before the first step for everything else."""

import sys
import types

import numpy as np
import pytest
import torch

from learner.setup.preflight import check_losses
from streamrl.algorithms import Estimator, Returns, Surrogate, TokenLoss
from streamrl.config.load import load_config
from streamrl.errors import ConfigError


@pytest.fixture
def mine(monkeypatch):
    """A module of the user's own, which the settings can name."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def with_surrogate(mine, function):
    function.__module__ = "mine"
    mine.f = function
    check_losses(load_config(["policy.model_path=somewhere", "loss.surrogate=mine:f", "loss.allow_uncorrected=true"]))


def with_estimator(mine, function):
    function.__module__ = "mine"
    mine.f = function
    check_losses(load_config(["policy.model_path=somewhere", "advantage.estimator=mine:f"]))


def losses(policy_logprobs, behavior_logprobs, advantages):
    return -(policy_logprobs - behavior_logprobs).exp() * advantages


def none(mask):
    return torch.zeros_like(mask)


def test_a_bare_tensor_is_the_losses_and_equals_a_token_loss_that_clips_nothing(mine):
    def bare(policy_logprobs, behavior_logprobs, advantages, mask):
        return losses(policy_logprobs, behavior_logprobs, advantages)

    def whole(policy_logprobs, behavior_logprobs, advantages, mask):
        return TokenLoss(losses(policy_logprobs, behavior_logprobs, advantages), none(mask))

    with_surrogate(mine, bare)
    with_surrogate(mine, whole)
    given = {name: torch.randn(2, 3) for name in ("policy_logprobs", "behavior_logprobs", "advantages")}
    given["mask"] = torch.ones(2, 3, dtype=torch.bool)
    one, two = Surrogate(bare)(given), Surrogate(whole)(given)
    assert torch.equal(one.losses, two.losses) and torch.equal(one.clipped, two.clipped) and not one.clipped.any()


def ok(policy_logprobs, behavior_logprobs, advantages, mask):
    return losses(policy_logprobs, behavior_logprobs, advantages)


SURROGATES = {
    "a scalar": (lambda policy_logprobs: policy_logprobs.sum(), r"a Tensor of \[\] and float32"),
    "rows": (lambda policy_logprobs: policy_logprobs.sum(1), r"a Tensor of \[3\] and float32"),
    "a list": (lambda policy_logprobs: [policy_logprobs], "returned a list"),
    "a pair": (lambda policy_logprobs, mask: (policy_logprobs, none(mask)), "returned a tuple"),
    "a number": (lambda policy_logprobs: 0.0, "returned a float"),
    "an array": (lambda policy_logprobs: policy_logprobs.detach().numpy(), "returned a ndarray"),
    "nothing": (lambda policy_logprobs: None, r"returned nothing \(is a `return` missing\?\)"),
    "integers": (lambda mask: mask.long(), "float"),
    "no gradient": (lambda advantages: -advantages, "without a gradient: compute them from policy_logprobs"),
    "detached": (lambda policy_logprobs: policy_logprobs.detach(), "without a gradient"),
    "clipped as numbers": (
        lambda policy_logprobs: TokenLoss(policy_logprobs, torch.zeros_like(policy_logprobs)),
        r"`clipped` that is a Tensor of \[3, 4\] and float32"),
    "clipped of another shape": (
        lambda policy_logprobs: TokenLoss(policy_logprobs, torch.zeros(3, dtype=torch.bool)),
        r"`clipped` that is a Tensor of \[3\] and bool"),
    "no clipped": (lambda policy_logprobs: TokenLoss(policy_logprobs, None), "`clipped` that is nothing"),
    "wrong losses inside": (
        lambda policy_logprobs, mask: TokenLoss(policy_logprobs.sum(), none(mask)), "losses that are a Tensor of"),
}


@pytest.mark.parametrize("case", SURROGATES)
def test_a_bad_return_of_a_surrogate_is_one_sentence(case, mine):
    function, why = SURROGATES[case]
    with pytest.raises(ConfigError, match=why) as caught:
        with_surrogate(mine, function)
    said = str(caught.value)
    assert said.startswith("loss.surrogate=mine:") and "\n" not in said and "Traceback" not in said
    assert "return TokenLoss(losses=[B, T], clipped=bool [B, T]), or the losses alone" in said


ESTIMATORS = {
    "a scalar": (lambda rewards, mask: rewards.sum(), r"a Tensor of \[\] and float32; return a float tensor \[B, T\]"),
    "rows": (lambda rewards, mask: rewards.sum(1), r"a Tensor of \[4\] and float32; return a float tensor \[B, T\]"),
    "tokens for trajectories": (
        lambda scores, group_ids: torch.zeros(2, 2), r"a Tensor of \[2, 2\] and float32; return a float tensor \[P\]"),
    "a list": (lambda rewards: rewards.tolist(), "returned a list"),
    "integers": (lambda mask: mask.long(), "and int64"),
    "an array": (lambda rewards: np.zeros(tuple(rewards.shape)), "returned a ndarray"),
    "nothing": (lambda rewards: None, "returned nothing"),
    "returns of another shape": (
        lambda rewards: Returns(rewards, rewards.sum()), r"`targets` that is a Tensor of \[\] and float32"),
    "a tensor where a critic is trained": (
        lambda rewards, values: rewards - values, r"return Returns\(advantages, targets\), .* reads a critic"),
    "not a number": (lambda rewards: rewards * float("nan"), r"made advantages of \[nan, .*they must be finite"),
    "infinite": (lambda scores, group_ids: scores / 0.0, "made advantages of .*inf.*they must be finite"),
}


@pytest.mark.parametrize("case", ESTIMATORS)
def test_a_bad_return_of_an_estimator_is_one_sentence(case, mine):
    function, why = ESTIMATORS[case]
    with pytest.raises(ConfigError, match=why) as caught:
        with_estimator(mine, function)
    said = str(caught.value)
    assert said.startswith("advantage.estimator=mine:") and "\n" not in said


def test_a_parameter_that_is_neither_input_nor_knob_is_told_before_anything_else(mine):
    def surrogate(policy_logprobs, olprobs, advantages, mask):
        raise AssertionError("it is not called")

    def estimator(rewards, mask, lamda): ...

    mine.f, mine.g = surrogate, estimator
    words = ["policy.model_path=somewhere", "loss.surrogate=mine:f"]
    told = r"mine:f: its parameter 'olprobs' is no input and has no value. Did you mean .*logprobs.* inputs are "
    with pytest.raises(ConfigError, match=told):  # though without it nothing weighs stale data
        check_losses(load_config(words))
    with pytest.raises(ConfigError, match="applies the whole ratio"):
        check_losses(load_config([*words, "loss.options.olprobs=1"]))
    with pytest.raises(ConfigError, match=r"mine:g: its parameter 'lamda'.*set advantage.options.lamda=VALUE"):
        check_losses(load_config([words[0], "advantage.estimator=mine:g"]))


def raises(policy_logprobs, behavior_logprobs, advantages):
    return policy_logprobs[:, :0] + behavior_logprobs


@pytest.mark.parametrize(("function", "why"), [
    (raises, r"RuntimeError: .*test_own_algorithm.py, line \d+: return policy_logprobs\[:, :0\]"),
    (lambda policy_logprobs: policy_logprobs.nothing, "AttributeError: .*nothing"),
])
def test_what_an_own_function_raises_is_one_sentence_with_its_line(function, why, mine):
    with pytest.raises(ConfigError, match=why) as caught:
        with_surrogate(mine, function)
    assert "\n" not in str(caught.value) and "loss.surrogate='mine:f'" in str(caught.value)


def test_a_module_that_fails_while_it_is_imported_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "brokenalgo.py").write_text("x = 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"brokenalgo failed while it was imported, see its code: ZeroDivisionError"):
        check_losses(load_config(["policy.model_path=somewhere", "loss.surrogate=brokenalgo:f"]))


def test_right_ones_of_each_kind_pass(mine):
    with_estimator(mine, lambda scores, group_ids: scores)
    with_estimator(mine, lambda rewards, mask: Returns(rewards, rewards))
    with_estimator(mine, lambda rewards, values, mask: Returns(rewards - values, rewards))
    assert Estimator(lambda rewards: rewards)({"rewards": torch.ones(1, 2), "mask": torch.ones(1, 2).bool()}).sum() == 2
