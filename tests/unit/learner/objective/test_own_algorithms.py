"""A user's own surrogate, estimator or correction is named in a setting and needs no change to our files."""

import pytest
import torch

from learner.data.packing import pack
from learner.objective.objective import Objective
from learner.objective.token_batch import PassOutputs
from learner.setup.preflight import check_losses
from streamrl.config.load import load_config
from streamrl.config.schema import AdvantageConfig, LossConfig
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, plan_of

VERSION = 5
PLAIN = LossConfig(surrogate="tis", veto_low=None, veto_high=None)
MODULE = '''
import torch
from streamrl.algorithms import Correction, CorrectionSpec, Estimator, Returns, Surrogate, TokenLoss

NOT_A_FUNCTION = 3


def squared(behavior_logprobs, policy_logprobs, advantages, mask, lags, eps_high=0.2, strength=1.0):
    """-strength (log pi - log mu)^2 A (1 + lag), 0 beyond the clip."""
    ratio = policy_logprobs - behavior_logprobs
    far = mask & (ratio.detach() > eps_high)
    losses = torch.where(mask & ~far, -strength * ratio.square() * advantages * (1 + lags), 0.0)
    return TokenLoss(losses, far)


def likelihood(policy_logprobs, advantages, mask):
    return TokenLoss(torch.where(mask, -advantages * policy_logprobs, 0.0), torch.zeros_like(mask))


def widest(log_ratios, advantages, mask, *, eps_low, eps_high):
    return float(log_ratios.abs().max())


def fitted(behavior_logprobs, policy_logprobs, advantages, mask, bounds, eps_low=0.0, eps_high=0.0):
    return TokenLoss(torch.where(mask, -bounds * advantages * policy_logprobs, 0.0), torch.zeros_like(mask))


FITTED = Surrogate(fitted, fit=widest)


def best_of_group(scores, group_ids, margin=0.0):
    best = torch.stack([scores[group_ids == group].max() for group in group_ids])
    return (scores >= best - margin).double()


def to_go(rewards, mask, gamma=1.0):
    return torch.where(mask, gamma * rewards.flip(1).cumsum(1).flip(1), 0.0)


def one_step(rewards, values, mask, bootstrap_values):
    return Returns(torch.where(mask, rewards - values, 0.0), torch.where(mask, rewards, 0.0))


def root(log_ratios, mask):
    return Correction(torch.where(mask, (log_ratios / 2).exp(), 0.0), mask.clone())


def first_half(log_ratios, mask):
    keep = mask.clone()
    keep[:, keep.shape[1] // 2:] = False
    return Correction(torch.ones_like(log_ratios), keep)


HALF = CorrectionSpec(mode="bypass", function=first_half)
'''


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """Name of a module that holds a user's algorithms."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def step(advantage: AdvantageConfig, loss: LossConfig, *, max_lag: int = 4):
    """(micro-batch, log-probs with their gradient times the number of tokens, statistics) of one step."""
    rows = batch(2, 3)
    made = Objective(advantage, loss, max_new_tokens=16, max_lag=max_lag)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    (micro,) = pack(rows, 10_000, bootstrap=made.has_critic)
    generator = torch.Generator().manual_seed(0)
    recorded = micro.behavior_logprobs[micro.mask]
    logprobs = (recorded + 0.3 * torch.randn(recorded.shape, generator=generator)).requires_grad_()
    if made.needs:
        values = torch.full(micro.mask.shape, 0.25)
        policy = micro.padded(logprobs.detach())
        one.observe(micro, PassOutputs(policy=policy, values=values, bootstrap=torch.zeros(len(rows))))
        one.close_observation()
    one.loss(micro, logprobs, torch.ones_like(logprobs)).backward()
    return micro, logprobs.detach(), logprobs.grad * micro.num_scored, one.finish().flush(1)


def per_token(micro, per_row) -> torch.Tensor:
    return torch.as_tensor(per_row)[:, None].expand(micro.mask.shape)[micro.mask]


def leave_one_out(micro) -> torch.Tensor:
    rows = batch(2, 3)
    others = [[r.reward for r in rows if r.group_id == row.group_id and r.index != row.index] for row in rows]
    return per_token(micro, [row.reward - sum(rest) / len(rest) for row, rest in zip(rows, others, strict=True)])


def dry(*words: str) -> None:
    check_losses(load_config(["policy.model_path=somewhere", *words]))


def test_a_function_as_surrogate_trains_by_its_formula_and_reads_the_clip_and_its_own_options(own):
    loss = LossConfig(
        surrogate=f"{own}:squared", veto_low=None, veto_high=None, clip_high=0.1, options={"strength": 3.0}
    )
    micro, logprobs, gradient, stats = step(AdvantageConfig(), loss)

    ratio, lags = logprobs - micro.behavior_logprobs[micro.mask], (VERSION - micro.versions)[micro.mask]
    expected = torch.where(ratio > 0.1, 0.0, -6.0 * ratio * leave_one_out(micro) * (1 + lags))
    torch.testing.assert_close(gradient, expected.float(), atol=1e-5, rtol=1e-4)
    assert stats["policy/clip_fraction"] == pytest.approx(float((ratio > 0.1).float().mean()))
    dry(f"loss.surrogate={own}:squared", "loss.options.strength=2.0")


def test_a_surrogate_without_a_denominator_carries_no_ratio(own):
    loss = LossConfig(surrogate=f"{own}:likelihood", veto_low=None, veto_high=None)
    with pytest.raises(ConfigError, match="nothing applies the whole ratio"):
        step(AdvantageConfig(), loss)

    micro, _, gradient, _ = step(AdvantageConfig(), loss, max_lag=0)
    torch.testing.assert_close(gradient, -leave_one_out(micro).float())


def test_an_entry_can_ask_for_bounds_over_the_batch(own):
    loss = LossConfig(surrogate=f"{own}:FITTED", veto_low=None, veto_high=None)
    micro, logprobs, gradient, _ = step(AdvantageConfig(), loss)

    widest = (logprobs - micro.behavior_logprobs[micro.mask]).abs().max()
    torch.testing.assert_close(gradient, -widest * leave_one_out(micro).float(), atol=1e-5, rtol=1e-4)
    dry(f"loss.surrogate={own}:FITTED")


def test_a_function_of_scores_and_groups_as_estimator_gives_one_advantage_a_trajectory(own):
    advantage = AdvantageConfig(estimator=f"{own}:best_of_group", options={"margin": 0.01})
    micro, logprobs, gradient, _ = step(advantage, PLAIN)

    rows = batch(2, 3)
    best = {group: max(r.reward for r in rows if r.group_id == group) for group in (0, 1)}
    won = per_token(micro, [float(row.reward >= best[row.group_id] - 0.01) for row in rows])
    ratio = (logprobs - micro.behavior_logprobs[micro.mask]).exp().clamp(max=2.0)
    torch.testing.assert_close(gradient, -won * ratio, atol=1e-5, rtol=1e-4)
    dry(f"advantage.estimator={own}:best_of_group")


@pytest.mark.parametrize(("name", "value"), [("to_go", 0.0), ("one_step", 0.25)])
def test_a_function_of_rewards_as_estimator_has_a_critic_if_it_takes_values(own, name, value):
    advantage = AdvantageConfig(estimator=f"{own}:{name}", baseline="none")
    micro, logprobs, gradient, _ = step(advantage, PLAIN)

    earned = micro.rewards if name == "one_step" else micro.rewards.flip(1).cumsum(1).flip(1)
    ratio = (logprobs - micro.behavior_logprobs[micro.mask]).exp().clamp(max=2.0)
    torch.testing.assert_close(gradient, -ratio * (earned[micro.mask] - value), atol=1e-5, rtol=1e-4)
    dry(f"advantage.estimator={own}:{name}", "loss.surrogate=tis")


def test_a_function_as_correction_weighs_pi_over_mu(own):
    loss = LossConfig(surrogate="reinforce", correction=f"{own}:root", veto_low=None, veto_high=None)
    micro, logprobs, gradient, _ = step(AdvantageConfig(), loss)

    root = ((logprobs - micro.behavior_logprobs[micro.mask]) / 2).exp()
    torch.testing.assert_close(gradient, -root * leave_one_out(micro).float(), atol=1e-5, rtol=1e-4)
    dry("loss.surrogate=reinforce", f"loss.correction={own}:root")
    with pytest.raises(ConfigError, match="applied more than once"):
        step(AdvantageConfig(), LossConfig(correction=f"{own}:root"))


def test_a_correction_that_only_rejects_goes_with_a_surrogate_that_weighs(own):
    micro, _, gradient, stats = step(AdvantageConfig(), LossConfig(correction=f"{own}:HALF"))

    width = micro.mask.shape[1]
    late = (torch.arange(width) >= width // 2).expand(micro.mask.shape)[micro.mask]
    assert not gradient[late].any() and gradient[~late].any()
    assert stats["keep/rejected"] == pytest.approx(float(late.float().mean()))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["loss.surrogate={}:missing"], "has no 'missing'"),
        (["loss.surrogate={}:NOT_A_FUNCTION"], "must be a function or a Surrogate"),
        (["loss.surrogate={}:squared", "loss.cap=2"], "loss.cap=2.0 does nothing"),
        (["loss.surrogate={}:squared", "loss.options.power=2"], "takes there: strength"),
        (["advantage.estimator={}:to_go", "advantage.lam=0.5"], "advantage.lam=0.5 does nothing"),
        (["advantage.estimator={}:best_of_group", "advantage.baseline=opob"], "advantage.baseline=opob does nothing"),
    ],
)
def test_what_a_users_function_does_not_read_is_refused_as_for_ours(own, words, says):
    with pytest.raises(ConfigError, match=says):
        dry(*(word.format(own) for word in words))
