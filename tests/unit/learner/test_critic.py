"""The critic: what it learns, what it must not touch, and that it survives a restart."""

import math
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from transformers import AutoConfig

import learner.model.critic as critic_module
from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.data.packing import pack
from learner.model.critic import VALUE_HEAD, build_critic
from learner.model.optimizer import make_optimizer
from learner.model.policy import load_policy
from learner.publish.export import export_critic
from learner.ranks.mesh import Ranks
from learner.supervised.methods import export_reward_model, load_reward_network
from streamrl.architectures.miniature import build_miniature
from streamrl.config.schema import (
    AdvantageConfig,
    CriticAvgLevel,
    CriticConfig,
    CriticKind,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from streamrl.errors import ConfigError
from tests.kit.learning import VOCAB, OneBatch, batch, make_objective, plan_of

ALONE = Ranks()
FAST = CriticConfig(optimizer=OptimizerConfig(lr=3e-3))


class Scene:
    """A tiny policy, its critic, and a batch that both have looked at."""

    def __init__(self, model_dir, config=FAST, estimator="vtrace", *, max_tokens=60, rows=None):
        self.policy = load_policy(model_dir)
        self.rows = rows or batch(3, 4)
        self.objective = make_objective(
            AdvantageConfig(estimator=estimator, baseline="none"), LossConfig(veto_low=None, veto_high=None)
        )
        torch.manual_seed(0)
        self.critic = build_critic(
            config, estimator, self.policy, model_dir, num_steps=50, dtype=torch.float32, ranks=ALONE
        )
        self.micros = pack(self.rows, max_tokens, bootstrap=True)
        self.look()

    def look(self, **options):
        self.one = OneBatch(self.objective, self.rows, plan_of(self.rows), version=5)
        self.one.score(self.policy, self.micros, critic=self.critic, **options)

    def values(self):
        return torch.cat([self.one.plan.outputs_of(m).values[m.mask] for m in self.micros])

    def fit(self, step=0):
        return self.critic.fit([self.micros], self.one.plan.critic_targets, step=step)


@pytest.mark.parametrize(("kind", "estimator"), [("head", "vtrace"), ("model", "gae"), ("head", "retrace_q")])
def test_values_start_at_zero_and_come_to_explain_the_rewards(checkpoints, kind, estimator):
    config = replace(FAST, kind=CriticKind(kind))
    scene = Scene(checkpoints["qwen3-tied"], config, estimator, rows=[replace(r, truncated=False) for r in batch(3, 4)])
    assert torch.count_nonzero(scene.values()) == 0
    first = scene.fit()
    for step in range(1, 25):
        scene.look()
        last = scene.fit(step)

    assert first.explained_variance == pytest.approx(0.0, abs=1e-6)
    assert last.explained_variance > 0.3
    assert last.loss < 0.7 * first.loss
    assert 0.0 < last.value_error < first.value_error and first.return_variance > 0.0 and last.clip_fraction == 0.0
    clipped = Scene(checkpoints["qwen3-tied"], replace(config, clip=1e-6, num_steps=10), estimator).fit()
    assert clipped.clip_fraction == pytest.approx(0.9, abs=0.03), "in all steps of the batch but the first"


@pytest.mark.parametrize("kind", ["head", "model"])
def test_fitting_the_critic_leaves_the_policy_alone(checkpoints, kind):
    scene = Scene(checkpoints["qwen3-tied"], replace(FAST, kind=CriticKind(kind)))
    before = [p.detach().clone() for p in scene.policy.parameters()]
    scene.fit()

    assert all(p.grad is None for p in scene.policy.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, scene.policy.parameters(), strict=True))


@pytest.mark.shows("critic.by_minibatch")
def test_a_critic_may_take_a_step_after_each_minibatch_over_the_mean_of_its_tokens(checkpoints, monkeypatch):
    once, each = (
        Scene(checkpoints["qwen3-tied"], replace(FAST, num_steps=2, by_minibatch=by), max_tokens=40)
        for by in (False, True)
    )
    done, backward, step = [], each.critic._backward, critic_module.optimizer_step

    def watched(batch, targets_of, count, start):
        done.append((batch.trajectory_ids, count))
        return backward(batch, targets_of, count, start)

    monkeypatch.setattr(each.critic, "_backward", watched)
    monkeypatch.setattr(critic_module, "optimizer_step", lambda *args, **o: done.append("step") or step(*args, **o))
    parts = [each.micros[:1], each.micros[1:]]
    sizes = [float(sum(int(micro.mask.sum()) for micro in part)) for part in parts]
    each.critic.fit(parts, each.one.plan.critic_targets, step=0)

    one_pass = [one for part, size in zip(parts, sizes, strict=True)
                for one in (*((micro.trajectory_ids, size) for micro in part), "step")]
    assert len(parts[1]) > 1 and sizes[0] != sizes[1] and done == one_pass * 2
    done.clear()
    once.fit()
    assert done == ["step"] * 2
    once.look(), each.look()
    assert not torch.allclose(once.values(), each.values(), atol=1e-4)


def shifted(scene, factor, shift):
    """Targets of a batch as a function, moved as if rewards were of another size."""
    def targets_of(micro):
        goal = scene.one.plan.critic_targets(micro)
        return replace(goal, targets=factor * goal.targets + shift)
    return targets_of


def test_all_values_begin_at_the_mean_target_of_the_first_batch(checkpoints):
    still = replace(FAST, optimizer=OptimizerConfig(lr=0.0))
    scene = Scene(checkpoints["qwen3-tied"], still)
    goals = torch.cat([shifted(scene, 1.0, 7.0)(m).targets[m.mask] for m in scene.micros])
    scene.critic.fit([scene.micros], shifted(scene, 1.0, 7.0), step=0)
    scene.look()

    assert scene.values() == pytest.approx(float(goals.mean()), abs=1e-5)


@pytest.mark.parametrize(("kind", "estimator"), [("head", "vtrace"), ("model", "gae"), ("head", "retrace_q")])
def test_values_stay_where_they_are_when_the_returns_change_their_scale(checkpoints, kind, estimator):
    """PopArt: targets of another mean and size move the normalization, and only the optimizer moves values."""
    scene = Scene(checkpoints["qwen3-tied"], replace(FAST, kind=CriticKind(kind)), estimator)
    for step in range(3):
        scene.fit(step)
        scene.look()
    before, outputs = scene.values(), [scene.one.plan.outputs_of(m).action_values for m in scene.micros]
    scene.critic._schedule = replace(scene.critic._schedule, lr=0.0)
    normal = scene.critic._normal
    scene.critic.fit([scene.micros], shifted(scene, 30.0, -100.0), step=3)
    scene.look()

    assert scene.critic._normal[1] > 2 * normal[1] and scene.critic._normal[0] < normal[0] - 5
    assert scene.values() == pytest.approx(before, abs=1e-4)
    for micro, old in zip(scene.micros, outputs, strict=True):
        new = scene.one.plan.outputs_of(micro).action_values
        assert old is None or torch.allclose(new, old, atol=1e-4)


def test_the_size_of_rewards_does_not_change_what_is_learned(checkpoints):
    """Values of rewards a thousand times as large are a thousand times as large, with the same rate and clip."""
    found = []
    for factor in (1.0, 1000.0):
        scene = Scene(checkpoints["qwen3-tied"], replace(FAST, optimizer=replace(FAST.optimizer, eps=1e-5)))
        first = {m.trajectory_ids: shifted(scene, factor, 0.0)(m) for m in scene.micros}
        for step in range(3):
            scene.look()
            scene.critic.fit([scene.micros], lambda micro, first=first: first[micro.trajectory_ids], step=step)
        scene.look()
        found.append(scene.values() / factor)

    assert torch.allclose(*found, atol=1e-3)


def test_the_variance_of_returns_is_explained_apart_from_that_of_targets(checkpoints):
    """Targets that V-trace left at the values flatter the critic; the recorded returns do not."""
    scene = Scene(checkpoints["qwen3-tied"])
    scene.fit()
    scene.look()

    def at_values(micro):
        goal = scene.one.plan.critic_targets(micro)
        return replace(goal, targets=goal.old)

    result = scene.critic.fit([scene.micros], at_values, step=1)
    assert result.explained_variance == 1.0
    assert result.return_explained_variance < 0.9


def test_the_number_of_micro_batches_changes_nothing(checkpoints):
    found = []
    # The targets' mean is taken off: Adam's first step would make a signal of the rounding in the bias's gradient.
    config = replace(FAST, optimizer=replace(FAST.optimizer, eps=1e-5))
    for max_tokens in (500, 40):
        scene = Scene(checkpoints["qwen3-tied"], config, max_tokens=max_tokens)
        result = scene.fit()
        scene.look()
        found.append((result.loss, result.explained_variance, result.grad_norm, float(scene.values().square().sum())))

    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


def test_only_truncated_trajectories_have_a_value_after_their_end(checkpoints):
    rows = [replace(row, truncated=i % 2 == 0, judged=i % 4 == 0) for i, row in enumerate(batch(3, 4))]
    scene = Scene(checkpoints["qwen3-tied"], rows=rows)
    scene.fit()
    scene.look()

    for micro in scene.micros:
        ends = scene.one.plan.outputs_of(micro).bootstrap
        assert [bool(end != 0) for end in ends] == [i % 4 == 2 for i in micro.trajectory_ids]


def test_a_critic_model_may_look_in_larger_passes_than_it_is_fitted_in(checkpoints):
    scene = Scene(checkpoints["qwen3-tied"], replace(FAST, kind=CriticKind.model), max_tokens=40)
    scene.fit()
    scene.look()
    small, passes = scene.one.plan, pack(scene.rows, 500, bootstrap=True)
    scene.look(passes=passes)

    assert len(passes) == 1 < len(scene.micros) and scene.one.plan.outputs.keys() == small.outputs.keys()
    for micro in scene.micros:
        before, now = (plan.outputs_of(micro) for plan in (small, scene.one.plan))
        for name in ("policy", "values", "bootstrap"):
            torch.testing.assert_close(getattr(now, name), getattr(before, name), atol=1e-5, rtol=1e-5)
        assert before.values.abs().sum() > 0
    assert math.isfinite(scene.fit(1).loss)


@pytest.mark.shows("critic.loss_factor", "critic.avg_level")
def test_the_critics_loss_is_that_of_the_formula_in_float64(checkpoints):
    """`f max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)` over all tokens, or in each trajectory first."""
    found, slow = [], replace(FAST.optimizer, eps=0.1)  # an Adam that sees the size of a gradient
    for factor, level in product((0.5, 1.0), CriticAvgLevel):
        config = replace(FAST, clip=0.05, loss_factor=factor, avg_level=level, optimizer=slow)
        scene = Scene(checkpoints["qwen3-tied"], config, max_tokens=40)
        scene.fit()
        scene.look()
        goals, rows = {}, []
        for micro in scene.micros:
            goal = scene.one.plan.critic_targets(micro)
            goal = replace(goal, old=goal.old + 0.1 * torch.arange(goal.old.numel()).sin().view_as(goal.old))
            goals[micro.trajectory_ids] = goal
            values, old = scene.one.plan.outputs_of(micro).values.double(), goal.old.double()
            near = torch.clamp(values, old - 0.05, old + 0.05)
            losses = factor * torch.maximum((values - goal.targets).square(), (near - goal.targets).square())
            rows += [row[kept] for row, kept in zip(losses, goal.trained, strict=True)]
        parts = [torch.cat(rows)] if level is CriticAvgLevel.token else rows
        result = scene.critic.fit([scene.micros], lambda micro, goals=goals: goals[micro.trajectory_ids], step=1)
        scene.look()
        found.append(scene.values())

        assert result.loss == pytest.approx(sum(float(part.mean()) for part in parts) / len(parts), rel=1e-5)
        assert 0.2 < result.clip_fraction < 0.9
    assert all(not torch.allclose(*pair, atol=1e-6) for pair in combinations(found, 2))


def moved(checkpoint, config, rounds=1):
    scene = Scene(checkpoint, config)
    for step in range(rounds):
        scene.look()
        scene.fit(step)
    scene.look()
    return scene.values()


@pytest.mark.shows(
    "critic.kind", "critic.num_steps", "critic.optimizer.lr", "critic.optimizer.beta1", "critic.optimizer.beta2",
    "critic.optimizer.eps", "critic.optimizer.weight_decay", "critic.optimizer.max_grad_norm", "critic.optimizer.name",
    "critic.optimizer.options",
)
def test_each_setting_of_the_critic_moves_its_values(checkpoints):
    path = checkpoints["qwen3-tied"]
    plain = moved(path, FAST, rounds=3)
    changes = [
        {"num_steps": 3}, {"kind": CriticKind.model},
        {"optimizer": replace(FAST.optimizer, lr=1e-4)},
        {"optimizer": replace(FAST.optimizer, beta1=0.0)},
        {"optimizer": replace(FAST.optimizer, beta2=0.5)},
        {"optimizer": replace(FAST.optimizer, eps=1e-1)},
        {"optimizer": replace(FAST.optimizer, weight_decay=10.0)},
        {"optimizer": replace(FAST.optimizer, max_grad_norm=1e-9)},
        {"optimizer": replace(FAST.optimizer, name="sgd")},
        {"optimizer": replace(FAST.optimizer, name="muon", options={"momentum": 0.5})},
    ]
    for change in changes:
        other = moved(path, replace(FAST, **change), rounds=3)
        assert not torch.allclose(other, plain, rtol=1e-4, atol=1e-7), change


@pytest.mark.shows("critic.frozen")
def test_the_named_parts_of_a_critic_model_stay_as_they_are(checkpoints):
    scene = Scene(checkpoints["qwen3-tied"], replace(FAST, kind=CriticKind.model, frozen=["self_attn"]))
    before = {name: tensor.clone() for name, tensor in scene.critic.module.state_dict().items()}
    for step in range(2):  # the head starts at 0: until it has moved, nothing below it learns
        scene.look()
        scene.fit(step)

    after = scene.critic.module.state_dict()
    frozen = {name for name in before if "self_attn" in name}
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    assert all(not torch.equal(before[name], after[name]) for name in before if "mlp" in name or "head" in name)


@pytest.mark.parametrize(("kind", "frozen", "message"), [
    ("head", ["self_attn"], "is for critic.kind=model"),
    ("model", ["selfattn"], "no parameter is called 'selfattn'; name one of .*self_attn"),
    ("model", ["decoder", "head"], "leaves nothing to train"),
])
def test_parts_that_cannot_be_frozen_are_refused(checkpoints, kind, frozen, message):
    with pytest.raises(ConfigError, match=message):
        Scene(checkpoints["qwen3-tied"], replace(FAST, kind=CriticKind(kind), frozen=frozen))


@pytest.mark.shows(
    "critic.scheduler.name", "critic.scheduler.warmup_ratio", "critic.scheduler.num_warmup_steps",
    "critic.scheduler.decay_ratio", "critic.scheduler.min_lr", "critic.scheduler.options",
)
@pytest.mark.parametrize(("settings", "rates"), [
    ({}, [1.0, 1.0, 1.0]),
    ({"name": "linear"}, [1.0, 0.98, 0.96]),
    ({"name": "linear", "min_lr": 1.5e-3}, [1.0, 0.99, 0.98]),
    ({"warmup_ratio": 0.04}, [1 / 3, 2 / 3, 1.0]),
    ({"num_warmup_steps": 1}, [1 / 2, 1.0, 1.0]),
    ({"name": "warmup_stable_decay", "decay_ratio": 0.98}, [1.0, 1.0, (1 + math.cos(math.pi / 49)) / 2]),
    ({"name": "inverse_sqrt", "options": {"timescale": 1}}, [1.0, 2 ** -0.5, 3 ** -0.5]),
])
def test_the_critics_rate_follows_its_own_schedule(checkpoints, settings, rates):
    scene = Scene(checkpoints["qwen3-tied"], replace(FAST, scheduler=ScheduleConfig(**settings)))
    found = []
    for step in range(3):
        scene.look()
        found.append(scene.fit(step).lr)

    assert found == pytest.approx([3e-3 * rate for rate in rates])


@pytest.mark.shows("critic.model_path")
def test_a_critic_model_may_start_from_another_checkpoint(checkpoints):
    own = replace(FAST, kind=CriticKind.model)
    other = replace(own, model_path=str(checkpoints["llama-tied"]))

    assert not torch.allclose(moved(checkpoints["qwen3-tied"], own), moved(checkpoints["qwen3-tied"], other))


@pytest.mark.parametrize(("kind", "estimator", "family"), [
    ("head", "vtrace", ""), ("model", "gae", ""), ("head", "retrace_q", ""), ("model", "gae", "opt"),
    ("model", "gae", "llama4_text"),
])
def test_an_exported_critic_starts_another_one_with_the_same_numbers(checkpoints, tmp_path, kind, estimator, family):
    """Also in families whose decoder is not the part of the model that transformers finds without a name."""
    path, config = checkpoints["qwen3"], replace(FAST, kind=CriticKind(kind))
    if family:
        path = tmp_path / "model"
        build_miniature(AutoConfig.for_model(family), seed=1).save_pretrained(path)
    scene = Scene(path, config, estimator)
    for step in range(3):
        scene.fit(step)
        scene.look()
    again = replace(config, model_path=str(export_critic(scene.critic, path, tmp_path / "critic", ALONE)))
    other = Scene(path, again, estimator)

    assert scene.values().abs().max() > 0.01 and torch.equal(scene.values(), other.values())
    assert torch.equal(scene.critic.moments, other.critic.moments)
    assert all(torch.equal(*pair) for pair in zip(
        scene.critic.module.state_dict().values(), other.critic.module.state_dict().values(), strict=True
    ))
    (tmp_path / "critic" / VALUE_HEAD).rename(tmp_path / "lost")
    if kind == "head":
        with pytest.raises(ConfigError, match="holds no value_head.safetensors.*RUN/critic"):
            Scene(path, again, estimator)
    else:
        assert torch.count_nonzero(Scene(path, again, estimator).values()) == 0


def test_a_critic_of_another_kind_or_size_is_refused(checkpoints, tmp_path):
    path = checkpoints["qwen3-tied"]
    for kind, other in (("head", "model"), ("model", "head")):
        scene = Scene(path, replace(FAST, kind=CriticKind(kind)))
        saved = str(export_critic(scene.critic, path, tmp_path / kind, ALONE))
        with pytest.raises(ConfigError, match=f"was trained with critic.kind={kind}: set it so"):
            Scene(path, replace(FAST, kind=CriticKind(other), model_path=saved))
    with pytest.raises(ConfigError, match=f"has a value head of 1 outputs for states of size .* needs {VOCAB + 1} for"):
        Scene(path, replace(FAST, model_path=str(tmp_path / "head")), "retrace_q")


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3"])
def test_a_reward_models_scores_are_the_first_values_and_survive_an_export(checkpoints, tmp_path, name):
    """They stay where they are while the moments of the run's targets replace those of the scores."""
    path = checkpoints[name]
    network = load_reward_network(path, LearnerConfig(), ALONE, dtype=torch.float32, gradient_checkpointing=False)
    with torch.no_grad():
        network.score.weight.normal_()
        next(network.decoder.parameters()).add_(0.1)
    model = export_reward_model(network, path, tmp_path / "model", ALONE, padding=0)
    config = replace(FAST, kind=CriticKind.model, model_path=str(model), optimizer=OptimizerConfig(lr=0.0))
    scene = Scene(path, config)
    scores = [network(m.tokens, m.positions, m.packing, m.state_index)[: m.num_scored] for m in scene.micros]
    expected = torch.cat(scores)
    assert torch.allclose(scene.values(), expected, atol=1e-6) and expected.std() > 0.1

    scene.critic.fit([scene.micros], shifted(scene, 30.0, -100.0), step=0)
    scene.look()
    again = replace(config, model_path=str(export_critic(scene.critic, path, tmp_path / "critic", ALONE)))
    assert torch.allclose(scene.values(), expected, atol=1e-4)
    assert torch.equal(Scene(path, again).values(), scene.values())


@pytest.mark.shows("critic.clip")
def test_the_clip_bounds_how_far_a_value_is_pulled(checkpoints):
    """Every value is farther from its target than the clip: the clipped loss has no gradient once a value moved."""
    loose, tight = (
        moved(checkpoints["qwen3-tied"], replace(FAST, num_steps=20, clip=clip)).abs().mean() for clip in (None, 1e-3)
    )
    assert tight < loose


def test_a_critic_comes_back_from_a_checkpoint_with_its_moments_and_its_place_in_the_schedule(checkpoints, tmp_path):
    path = checkpoints["qwen3-tied"]
    config = replace(FAST, scheduler=ScheduleConfig("inverse_sqrt", num_warmup_steps=3))
    scene = Scene(path, config)
    scene.fit()
    optimizer = make_optimizer(scene.policy, OptimizerConfig())
    save_checkpoint(tmp_path, 1, scene.policy, optimizer, ALONE, extra={}, blobs={}, num_keep=1,
                    also=scene.critic.tensors())
    other = Scene(path, config)
    assert other.critic.restore(find_checkpoint(tmp_path).shards())
    for each in (scene, other):
        each.look()
        each.fit(1)
        each.look()

    assert torch.equal(scene.values(), other.values())


def test_a_checkpoint_from_before_targets_were_normalized_keeps_its_values(checkpoints, tmp_path):
    """Its outputs were the values: mean 0 and scale 1, and another fit moves them from where they are."""
    path = checkpoints["qwen3-tied"]
    scene = Scene(path)
    scene.fit()
    scene.critic.moments = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    scene.look()
    optimizer = make_optimizer(scene.policy, OptimizerConfig())
    older = ((key, tensor) for key, tensor in scene.critic.tensors() if key != "critic/targets")
    save_checkpoint(tmp_path, 1, scene.policy, optimizer, ALONE, extra={}, blobs={}, num_keep=1, also=older)
    other = Scene(path)

    assert other.critic.restore(find_checkpoint(tmp_path).shards())
    other.look()
    assert torch.equal(scene.values(), other.values())
    other.fit(1)
    other.look()
    assert 0 < (scene.values() - other.values()).abs().max() < 0.5


def test_a_checkpoint_without_a_critic_says_so(checkpoints, tmp_path):
    scene = Scene(checkpoints["qwen3-tied"])
    optimizer = make_optimizer(scene.policy, OptimizerConfig())
    save_checkpoint(tmp_path, 1, scene.policy, optimizer, ALONE, extra={}, blobs={}, num_keep=1)

    assert not scene.critic.restore(find_checkpoint(tmp_path).shards())


def test_action_values_need_the_policys_own_distribution(checkpoints):
    path = checkpoints["qwen3-tied"]
    policy = load_policy(path)
    assert policy.vocab_size == VOCAB
    with pytest.raises(ConfigError, match="set critic.kind=head"):
        build_critic(
            replace(FAST, kind=CriticKind.model), "retrace_q", policy, path, num_steps=1, dtype=torch.float32,
            ranks=ALONE,
        )
