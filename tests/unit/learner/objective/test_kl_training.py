"""KL, entropy and constraints in training steps of a small model: each setting pulls the way it says."""

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch

from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.data.packing import pack
from learner.model.gradients import optimizer_step
from learner.model.networks import FrozenPolicy, load_reference, sync_if_due
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import Policy, load_policy
from learner.objective.options import needs_reference
from learner.objective.regularizers import LossWeights
from learner.objective.token_batch import PassOutputs
from learner.ranks.mesh import Ranks
from streamrl.algorithms import kl_estimate
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.schema import AdvantageConfig, OptimizerConfig
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, make_objective, plan_of, tiny_checkpoint

ALONE = Ranks()
PLAIN = ("advantage.estimator=group", "loss.surrogate=tis", "loss.veto_low=null", "loss.veto_high=null")
BASE = to_plain(load_config(["experiment=quickstart", *PLAIN]))
K2 = "kl.mode=k2_is"
STRONG = "kl.coef=3"
KINDS = ("k2_is", "k1_is", "k3_is", "k2", "k3", "k1+", "k3+")
BIASED = ("k2", "k3", "k1+", "k3+")
START = 5  # the version whose tokens the samples are


def test_the_recipe_of_trajectory_balance_has_the_slope_of_its_squared_error(start):
    """float64 autograd of `coef/2 (log Z + log pi - log pi_ref - R/coef)^2`, log Z of the group held fixed."""
    config = load_config(["algorithm=trajectory_balance", "policy.model_path=none", "kl.coef=0.05"])
    made = make_objective(config=config)
    rows = sampled_rows(start, lag=2)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        (torch.from_numpy(row.logprobs[row.mask]) + 0.3 * torch.randn(row.num_action_tokens, generator=generator))
        .requires_grad_() for row in rows
    ]
    reference = [0.2 * torch.randn(row.num_action_tokens, generator=generator) + leaf.detach()
                 for row, leaf in zip(rows, leaves, strict=True)]
    one = OneBatch(made, rows, plan_of(rows, version=START), version=START)
    (micro,) = pack(rows, 10_000)
    flat, other = (torch.cat([values[i] for i in micro.trajectory_ids]) for values in (leaves, reference))
    one.observe(micro, PassOutputs(policy=micro.padded(flat.detach()), reference=micro.padded(other)))
    one.close_observation()
    one.loss(micro, flat, torch.ones_like(flat)).backward()

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    gaps = [w.sum() - r.double().sum() - row.reward / 0.05 for w, r, row in zip(wide, reference, rows, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for row, gap in zip(rows, gaps, strict=True):
        siblings = [g.detach() for g, other in zip(gaps, rows, strict=True) if other.group_id == row.group_id]
        total = total + 0.05 / 2 * (gap - sum(siblings) / len(siblings)) ** 2 / len(rows)
    total.backward()
    for leaf, slow in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), slow.grad, atol=1e-6, rtol=1e-4)


@dataclass
class StepDone:
    """Everything after some steps."""

    policy: Policy
    controls: LossWeights
    reference: FrozenPolicy | None
    rows: list
    metrics: list[dict] = field(default_factory=list)

    def distance(self, start: Policy) -> float:
        """Mean k3 over the batch between the policy and where it began, nats."""
        (micro,) = pack(self.rows, 10_000)
        now, then = (micro.padded(score(model, micro)) for model in (self.policy, start))
        return float(kl_estimate(now, then, micro.mask).sum() / micro.mask.sum())


@torch.no_grad()
def score(policy, micro):
    return policy(
        micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
    )[0]


def sampled_rows(policy, num_groups=3, group_size=4, lag=0) -> list:
    """Trajectories whose recorded log-probs are the policy's own."""
    rows = batch(num_groups, group_size, version=START - lag, max_lag=0)
    fresh = []
    for row in rows:
        (micro,) = pack([row], 10_000)
        logprobs = np.zeros(len(row.mask), dtype=np.float32)
        logprobs[row.mask] = score(policy, micro).numpy()
        fresh.append(replace(row, logprobs=logprobs))
    return fresh


@cache
def rows_of_model(model_dir) -> list:
    return sampled_rows(load_policy(model_dir))


@cache
def train(
    model_dir, *words, num_steps=6, max_tokens=10_000, lr=5e-4, before=None, first=0, max_lag=4, reference_of=None
) -> StepDone:
    """Steps on one batch, wired as the learner wires them; the same words give the same object."""
    config = from_plain(BASE, words)
    policy, rows = load_policy(model_dir), rows_of_model(model_dir)
    controls = LossWeights(config.kl, config.entropy, config.constraint, config.loss, num_steps=first)
    reference = None
    if needs_reference(config.kl, config.constraint):
        reference = load_reference(config.reference, reference_of or model_dir, policy, ALONE, passes={})
    objective = make_objective(config=config, controls=controls, max_lag=max_lag)
    made = StepDone(policy, controls, reference, rows)
    optimizer = make_optimizer(policy, OptimizerConfig(lr=lr))
    if before is not None:
        before(made, optimizer)
    for step in range(first, first + num_steps):
        one = OneBatch(objective, rows, plan_of(rows, version=START), version=START)
        micro_batches = pack(rows, max_tokens)
        one.score(policy, micro_batches, frozen={"reference": reference})
        for micro in micro_batches:
            one.forward_backward(policy, micro)
        optimizer_step(policy, optimizer, Schedule("constant", lr, 100), step=step, max_grad_norm=1.0, ranks=ALONE)
        meter = one.finish()
        controls.record(meter)
        controls.update(meter, num_steps=step + 1)
        sync_if_due(reference, policy, every=config.reference.sync_every_steps, step=step + 1)
        made.metrics.append({key: value for key, value in meter.flush(step).items() if not isinstance(value, dict)})
    return made


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def start(model_dir):
    return load_policy(model_dir)


@pytest.fixture(scope="module")
def free(model_dir, start):
    """How far training goes without any pull."""
    return train(model_dir).distance(start)


# --- the KL term -----------------------------------------------------------------------------------------------------


def mode_words(kind: str) -> list[str]:
    return [f"kl.mode={kind}", *(["kl.allow_biased=true"] if kind in BIASED else [])]


# k1_is is unbiased only over fresh samples: on one batch trained again and again its noise does not cancel.
@pytest.mark.shows("kl.mode", "kl.coef")
@pytest.mark.parametrize("mode", ["reward_k1", "advantage", *(kind for kind in KINDS if kind != "k1_is")])
def test_a_larger_weight_keeps_the_policy_nearer_to_the_reference(model_dir, start, free, mode):
    weak, strong = (train(model_dir, *mode_words(mode), f"kl.coef={coef}") for coef in (0.001, 3.0))

    assert strong.distance(start) < 0.5 * weak.distance(start)
    assert weak.distance(start) == pytest.approx(free, rel=0.2)
    assert [row["kl/coef"] for row in strong.metrics] == [3.0] * 6
    assert abs(strong.metrics[0]["kl/value"]) < 1e-6 < 1e-4 < strong.metrics[3]["kl/value"]
    assert strong.metrics[3]["kl/clamped_fraction"] == 0.0


@pytest.mark.parametrize(
    "words",
    [
        ["advantage.estimator=vtrace_critic_free"], ["advantage.scale=batch_std"],
        ["advantage.estimator=reinforce_pp", "advantage.baseline=none"], ["advantage.estimator=reinforce_pp"],
    ],
)
def test_a_kl_in_the_reward_reaches_every_estimator_of_rewards_and_scores(model_dir, start, words):
    without, strong = (train(model_dir, *words, *more) for more in ([], ["kl.mode=reward_k1", STRONG]))

    assert strong.distance(start) < 0.8 * without.distance(start)
    assert strong.metrics[0]["reward/trained"] == without.metrics[0]["reward/trained"]  # what is reported is the task's


@pytest.mark.parametrize("mode", ["reward_k1", "advantage", "k2_is"])
@pytest.mark.parametrize("estimator", ["group", "reinforce_pp"])
def test_no_split_into_micro_batches_changes_a_step_with_kl(model_dir, mode, estimator):
    words = [
        *mode_words(mode), "kl.coef=0.5", f"advantage.estimator={estimator}", "constraint.kl_limit=0.001",
        "constraint.entropy_min=6", "entropy.adapt=coef", "entropy.target=5", "constraint.options.lr=1",
        *(["advantage.baseline=none"] if estimator == "reinforce_pp" else []),
    ]
    whole, split = (train(model_dir, *words, num_steps=3, max_tokens=most) for most in (10_000, 40))

    for mine, theirs in zip(whole.metrics, split.metrics, strict=True):
        assert mine["policy/num_microbatches"] == 1 < theirs["policy/num_microbatches"]
        theirs = {**theirs, "policy/num_microbatches": 1}
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def kl_gradient(*words) -> torch.Tensor:
    """What a KL term adds to the gradient in the log-probs of tokens whose ratio pi/mu is e^2, x being 1 nat."""
    config, rows = from_plain(BASE, words), batch(2, 2)
    gradients = []
    for objective in (make_objective(config=config), make_objective(config.advantage, config.loss)):
        one = OneBatch(objective, rows, plan_of(rows), version=START)
        (micro,) = pack(rows, 10_000)
        logprobs = (micro.behavior_logprobs[micro.mask] + 2).requires_grad_()
        one.observe(micro, PassOutputs(reference=micro.padded(logprobs.detach() - 1)))
        one.close_observation()
        one.loss(micro, logprobs, torch.zeros_like(logprobs)).backward()
        gradients.append(logprobs.grad * len(logprobs))
    return gradients[0] - gradients[1]


@pytest.mark.shows("kl.cap")
@pytest.mark.parametrize(
    ("words", "weight"),
    [
        ([K2], 2.0), ([K2, "kl.cap=4"], 4.0), ([K2, "kl.cap=9"], np.exp(2)),
        ([K2, "kl.cap=4", "loss.cap=1.1"], 4.0), (["kl.mode=advantage", "loss.cap=3"], 3.0),
        (["kl.mode=advantage", "loss.surrogate=reinforce", "loss.allow_uncorrected=true", "kl.cap=4"], 4.0),
    ],
)
def test_the_cap_bounds_the_weight_of_the_kl_term_alone(words, weight):
    """The surrogate's own cap counts only where the KL rides on the advantages."""
    torch.testing.assert_close(
        kl_gradient(*words, "kl.coef=0.5"), torch.full((num_tokens(batch(2, 2)),), 0.5 * weight), atol=1e-4, rtol=1e-4
    )


def num_tokens(rows) -> int:
    return sum(row.num_action_tokens for row in rows)


RHO, SHRINK = np.exp(2), 1 - np.exp(-1)


@pytest.mark.parametrize(
    ("kind", "slope"),
    [
        ("k2_is", 2.0), ("k1_is", 2 * RHO), ("k3_is", RHO), ("k2", 1.0), ("k3", SHRINK), ("k1+", 1.0), ("k3+", 1.0),
        ("advantage", 2.0),
    ],
)
def test_each_kind_has_the_gradient_of_its_formula(kind, slope):
    """By hand, at pi/mu = e^2 and x = 1."""
    expected = torch.full((num_tokens(batch(2, 2)),), 0.5 * slope)
    torch.testing.assert_close(kl_gradient(*mode_words(kind), "kl.coef=0.5"), expected, atol=1e-4, rtol=1e-4)


def test_a_kl_in_the_reward_comes_off_each_score_before_the_baseline():
    config, rows = from_plain(BASE, ["kl.mode=reward_k1", "kl.coef=0.5"]), batch(2, 2)
    objective = make_objective(config=config)
    one = OneBatch(objective, rows, plan_of(rows), version=START)
    gradients = [torch.empty(0)] * len(rows)
    observed = [pack([row], 10_000)[0] for row in rows]
    observed = [replace(micro, trajectory_ids=(place,)) for place, micro in enumerate(observed)]
    for place, micro in enumerate(observed):  # x of every token is the place of its trajectory, in nats
        recorded = micro.behavior_logprobs
        one.observe(micro, PassOutputs(policy=recorded, reference=recorded - place * micro.mask))
    one.close_observation()
    for place, micro in enumerate(observed):
        logprobs = micro.behavior_logprobs[micro.mask].clone().requires_grad_()
        one.loss(micro, logprobs, torch.zeros_like(logprobs)).backward()
        gradients[place] = logprobs.grad

    shaped = [row.reward - 0.5 * place * row.num_action_tokens for place, row in enumerate(rows)]
    advantage = [shaped[0] - shaped[1], shaped[1] - shaped[0], shaped[2] - shaped[3], shaped[3] - shaped[2]]
    for gradient, expected in zip(gradients, advantage, strict=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, -expected / num_tokens(rows)))


@pytest.mark.parametrize("estimator", ["gae", "vtrace", "td_lambda", "reinforce_pp"])
def test_a_kl_in_the_reward_comes_off_each_tokens_reward_where_estimators_look_ahead(estimator):
    """At pi = mu and values of zero the advantage is the return: the KL of this token and of all after it is off."""
    config, rows = from_plain(BASE, ["kl.mode=reward_k1", "kl.coef=0.5"]), batch(2, 2)
    objective = make_objective(AdvantageConfig(estimator=estimator, baseline="none"), config=config)
    one = OneBatch(objective, rows, plan_of(rows), version=START)
    (micro,) = pack(rows, 10_000)
    recorded, zeros = micro.behavior_logprobs, torch.zeros_like(micro.behavior_logprobs)
    one.observe(micro, PassOutputs(
        policy=recorded, reference=recorded - 0.2 * micro.mask, values=zeros, bootstrap=zeros[:, 0]
    ))
    one.close_observation()
    logprobs = recorded[micro.mask].clone().requires_grad_()
    one.loss(micro, logprobs, torch.zeros_like(logprobs)).backward()

    shaped = micro.rewards - 0.5 * 0.2 * micro.mask
    returns = shaped.flip(1).cumsum(1).flip(1)[micro.mask]
    if estimator == "reinforce_pp":
        returns = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(logprobs.grad * num_tokens(rows), -returns, atol=1e-4, rtol=1e-4)


def test_tokens_that_a_veto_removed_do_not_count_in_the_measured_kl():
    config, rows = from_plain(BASE, [K2, "loss.veto_high=50"]), batch(2, 2)
    objective = make_objective(config=config)
    one = OneBatch(objective, rows, plan_of(rows), version=START)
    (micro,) = pack(rows, 10_000)
    policy = micro.behavior_logprobs.clone()
    policy[0, 0] += 9  # this token's ratio is e^9, and it is 9 nats from the reference
    one.observe(micro, PassOutputs(reference=micro.behavior_logprobs))
    one.close_observation()
    logprobs = policy[micro.mask].requires_grad_()
    one.loss(micro, logprobs, torch.zeros_like(logprobs)).backward()

    assert one.finish().value("kl/value") == pytest.approx(0.0, abs=1e-6)


# --- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.shows("reference.model_path")
def test_the_reference_is_the_start_of_the_run_unless_another_model_is_given(tmp_path, model_dir, start, free):
    other = tiny_checkpoint(tmp_path / "other", "qwen3", tied=True, seed=1)
    toward = train(model_dir, K2, STRONG, f"reference.model_path={other}")

    assert toward.metrics[0]["kl/value"] > 0.1  # far from the other model at once
    assert toward.distance(load_policy(other)) < start_to(other, model_dir)
    assert train(model_dir).reference is None


def start_to(other, model_dir) -> float:
    policy = load_policy(model_dir)
    return StepDone(policy, None, None, sampled_rows(policy)).distance(load_policy(other))


def test_a_reference_of_another_vocabulary_or_shape_is_refused_by_name(tmp_path, model_dir):
    other = tiny_checkpoint(tmp_path / "gpt2", "gpt2", tied=True)
    words = [K2, f"reference.model_path={other}"]

    train(model_dir, *words, num_steps=1)  # another architecture may be a reference, but cannot follow
    with pytest.raises(ConfigError, match="reference model cannot follow"):
        train(model_dir, *words, "reference.sync_every_steps=2")
    with pytest.raises(ConfigError, match=f"reference.model_path={tmp_path}/none: .*no config.json"):
        train(model_dir, K2, f"reference.model_path={tmp_path}/none")


@pytest.mark.shows("reference.sync_every_steps")
def test_a_synced_reference_follows_the_policy_as_often_as_set(model_dir, start):
    fixed, synced = (
        train(model_dir, K2, STRONG, f"reference.sync_every_steps={n}") for n in (0, 2)
    )

    assert [row["kl/value"] < 1e-6 for row in synced.metrics] == [True, False] * 3  # zero right after each sync
    assert [row["kl/value"] < 1e-6 for row in fixed.metrics] == [True] + [False] * 5
    assert synced.distance(start) > fixed.distance(start)


def test_a_restart_goes_on_with_the_moved_reference_and_the_moved_weight(tmp_path, model_dir):
    words = [
        K2, "kl.controller=log_integral", "kl.options.target=0.001", "reference.sync_every_steps=2",
        "constraint.entropy_min=5",
    ]
    whole = train(model_dir, *words, num_steps=5)
    optimizers = []
    half = train(model_dir, *words, num_steps=3, before=lambda made, optimizer: optimizers.append(optimizer))
    save_checkpoint(
        tmp_path, 3, half.policy, optimizers[0], ALONE, extra={"controls": half.controls.to_plain()}, blobs={},
        num_keep=1, also=half.reference.tensors(),
    )

    def restored(made, optimizer):
        found = find_checkpoint(tmp_path, ALONE)
        found.restore(made.policy, optimizer, ALONE)
        made.controls.restore(found.extra["controls"])
        assert made.reference.restore(found.shards())

    resumed = train(model_dir, *words, num_steps=2, first=3, before=restored)

    for mine, theirs in zip(resumed.metrics, whole.metrics[3:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


# --- entropy and constraints -----------------------------------------------------------------------------------------


def last(made: StepDone, key: str) -> float:
    return made.metrics[-1][key]


def test_a_controller_that_finds_the_kl_too_large_pulls_harder_than_a_constant_weight(model_dir, start):
    words = [K2, "kl.coef=0.05"]
    constant = train(model_dir, *words, num_steps=8)
    doubling = train(
        model_dir, *words, "kl.controller=doubling", "kl.options.target=1e-5", "kl.options.high=100", num_steps=8
    )

    assert last(doubling, "kl/coef") > 10 * last(constant, "kl/coef")
    assert doubling.distance(start) < constant.distance(start)


def test_an_entropy_target_above_the_entropy_raises_it_through_the_bonus(model_dir):
    plain = train(model_dir)
    adaptive = train(
        model_dir, "entropy.adapt=coef", "entropy.target=9", "entropy.step=0.5", "entropy.high=3"
    )

    assert [row["entropy/coef"] for row in adaptive.metrics] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert last(adaptive, "entropy/mean") > last(plain, "entropy/mean") + 0.001


def test_an_entropy_target_widens_the_clip_that_the_surrogate_uses(model_dir):
    words = ["loss.surrogate=ppo_clip", "loss.clip_high=0.05", "loss.clip_low=0.05"]
    fixed = train(model_dir, *words, num_steps=10)
    wide = train(
        model_dir, *words, "entropy.adapt=clip_high", "entropy.target=9", "entropy.step=0.5", "entropy.low=0.05",
        "entropy.high=2", num_steps=10,
    )

    assert last(fixed, "clip/positive") > last(wide, "clip/positive")
    assert [row["clip/high"] for row in wide.metrics][:3] == pytest.approx([0.05, 0.55, 1.05])


@pytest.mark.shows("constraint.kl_limit")
@pytest.mark.parametrize(
    "words",
    [
        ["constraint.options.lr=100"], ["constraint.method=pid", "constraint.options.kp=100"],
        ["constraint.method=penalty", "constraint.options.weight=100"], ["constraint.options.lr=100",
                                                                         "constraint.one_sided=true"],
    ],
)
def test_a_limit_on_the_kl_pulls_back_a_policy_that_went_too_far(model_dir, start, words):
    free, bound = (
        train(model_dir, *more, num_steps=10) for more in ([], ["constraint.kl_limit=0.002", *words])
    )

    assert bound.metrics[0]["constraint/kl"] == 0.0 < last(bound, "constraint/kl")
    assert bound.distance(start) < 0.8 * free.distance(start)


def test_a_limit_that_is_kept_changes_nothing(model_dir, start, free):
    assert train(model_dir, "constraint.kl_limit=5").distance(start) == pytest.approx(free, rel=1e-3)


@pytest.mark.shows("constraint.entropy_min")
def test_a_least_entropy_is_defended(model_dir):
    free, bound = (
        train(model_dir, *more) for more in ([], ["constraint.entropy_min=9", "constraint.options.lr=0.2"])
    )

    assert last(bound, "entropy/mean") > last(free, "entropy/mean") + 0.001
    assert last(bound, "constraint/entropy") > 0.5
