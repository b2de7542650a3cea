"""Several optimizer steps on one batch: against a literal transcription of decoupled PPO, and what stays fixed."""

import math
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.checkpoint.checkpoint import find_resume_state
from learner.data.packing import pack_minibatches
from learner.loop.run import Run
from learner.model.gradients import BatchResult, StepResult
from learner.model.networks import Networks
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import load_policy
from learner.objective.loss import policy_term
from learner.objective.objective import Objective
from learner.objective.token_batch import LagPolicy
from learner.ranks.mesh import Ranks
from learner.setup.preflight import check_losses
from learner.trainer import Callbacks, Trainer, TrainerSettings
from streamrl.config.load import load_config
from streamrl.config.schema import AdvantageConfig, Config, LossConfig, OptimizerConfig, PublishWhen
from streamrl.errors import ConfigError
from tests.kit.learning import batch, plan_of

K, E, VERSION, LR, CAP = 2, 2, 5, 5e-3, 5.0
AREAL = LossConfig(
    surrogate="decoupled_ppo", anchor="recomputed", clip_low=0.2, clip_high=0.2, dual_clip=None, cap=CAP, veto_low=None,
    veto_high=None,
)
GROUP_STD = AdvantageConfig(baseline="group_mean", scale="std")


def fresh_rows(directory):
    """Four groups of three whose recorded log-probs are near the model's own, as behavior log-probs are."""
    model, rng = AutoModelForCausalLM.from_pretrained(directory), np.random.default_rng(1)
    rows = []
    for row in batch(4, 3, seed=2):
        with torch.no_grad():
            own = slow_logprobs(model, row).numpy()
        recorded = np.zeros_like(row.logprobs)
        recorded[row.mask] = own + rng.normal(0, 0.3, len(own))
        rows.append(replace(row, logprobs=recorded.astype(np.float32)))
    return rows


def in_minibatches(rows, world=1):
    """The plan with the first half of the groups in minibatch 0."""
    return [msgspec.structs.replace(one, minibatch=one.group_id // 2) for one in plan_of(rows, world=world)]


def trained(directory, rows, *, advantage=GROUP_STD, loss=AREAL, num_epochs=E, plan=None, max_tokens=60, **options):
    """(weights after one batch, statistics, the trainer, what its steps did)."""
    policy, plan = load_policy(directory), plan or in_minibatches(rows)
    num_minibatches = 1 + max(row.minibatch for row in plan)
    trainer = trainer_of(
        policy, advantage, loss, num_minibatches=num_minibatches, num_epochs=num_epochs, max_tokens=max_tokens
    )
    trained = trainer.train_batch(rows, plan, **options)
    weights = {name.removeprefix("model."): p.detach() for name, p in policy.named_parameters()}
    return weights, trained.measured.flush(1), trainer, trained.result


class NotesVersions(Callbacks):
    """Notes the versions inside a batch."""

    def __init__(self):
        self.inside = []

    def stepped(self, version):
        self.inside.append(version)


def trainer_of(policy, advantage, loss, *, num_epochs, num_minibatches=1, max_tokens=4000, schedule=None):
    """A lone trainer at VERSION."""
    objective = Objective(
        advantage, loss, max_new_tokens=16, max_lag=9, steps_per_batch=num_minibatches * num_epochs
    )
    return Trainer(
        Networks(policy, make_optimizer(policy, OptimizerConfig(lr=LR))), schedule or Schedule("linear", LR, 8),
        objective, TrainerSettings(max_tokens, num_minibatches, num_epochs), version=VERSION, callbacks=NotesVersions(),
    )


def slow_logprobs(model, row):
    """Log-probs of the action tokens of one unpacked trajectory, in double precision of plain transformers."""
    tokens = torch.from_numpy(np.concatenate([row.prompt_ids, row.token_ids])).long()
    logits = model(tokens[None]).logits[0].double()
    places = torch.from_numpy(np.flatnonzero(row.mask)) + len(row.prompt_ids)
    return logits[places - 1].log_softmax(-1).gather(1, tokens[places][:, None])[:, 0]


def slow_decoupled_ppo(directory, rows, *, moving_anchor=False):
    """AReaL, eq. 5, with K x E steps as PPO does them, a trajectory at a time; (weights, number of clipped tokens)."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    advantages = {}
    for row in rows:
        scores = np.array([other.reward for other in rows if other.group_id == row.group_id])
        advantages[row.group_id, row.index] = (row.reward - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    with torch.no_grad():
        frozen = {(row.group_id, row.index): slow_logprobs(model, row) for row in rows}
    number, num_clipped = 0, 0
    for _ in range(E):
        for minibatch in range(K):
            mine = [row for row in rows if row.group_id // 2 == minibatch]
            num_tokens = sum(int(row.mask.sum()) for row in mine)
            optimizer.zero_grad()
            for row in mine:
                policy = slow_logprobs(model, row)
                proximal = policy.detach() if moving_anchor else frozen[row.group_id, row.index]
                behavior = torch.from_numpy(row.logprobs[row.mask]).double()
                advantage = advantages[row.group_id, row.index]
                weight = (proximal - behavior).exp().clamp(max=CAP)
                ratio = (policy - proximal).exp()
                inside = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                num_clipped += int((inside != ratio * advantage).sum())
                (-(weight * inside).sum() / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 - (VERSION + number) / 8)  # linear, counted in optimizer steps
            optimizer.step()
            number += 1
    return {name: p.detach() for name, p in model.named_parameters()}, num_clipped


def test_k_minibatches_and_e_epochs_are_a_literal_decoupled_ppo_with_a_frozen_anchor(checkpoints):
    rows = fresh_rows(checkpoints["qwen3-tied"])
    weights, stats, trainer, result = trained(checkpoints["qwen3-tied"], rows)
    expected, num_clipped = slow_decoupled_ppo(checkpoints["qwen3-tied"], rows)
    moving, _ = slow_decoupled_ppo(checkpoints["qwen3-tied"], rows, moving_anchor=True)
    start = dict(AutoModelForCausalLM.from_pretrained(checkpoints["qwen3-tied"]).named_parameters())

    moved = max(float((p - start[name].detach()).abs().max()) for name, p in expected.items())
    apart = max(float((p - moving[name]).abs().max()) for name, p in expected.items())
    assert num_clipped > 10 and apart > moved / 20, "the anchor made no difference: the test has lost its teeth"
    for name, parameter in expected.items():
        torch.testing.assert_close(weights[name], parameter, atol=moved / 500, rtol=0, msg=name)
    num_tokens = sum(row.num_action_tokens for row in rows)
    assert stats["policy/clip_fraction"] * num_tokens * E == pytest.approx(num_clipped, abs=2)
    assert trainer.callbacks.inside == [6, 7, 8] and len(result.steps) == 4 and result.num_skipped == 0


def test_each_step_trains_at_its_own_version_and_lags_are_those_of_every_step(checkpoints):
    rows = fresh_rows(checkpoints["qwen3-tied"])
    _, stats, _, _ = trained(checkpoints["qwen3-tied"], rows)

    expected: dict[int, int] = {}
    for row in rows:
        for step in (row.group_id // 2, K + row.group_id // 2):
            for version in row.versions[row.mask]:
                lag = VERSION + step - int(version)
                expected[lag] = expected.get(lag, 0) + 1
    assert stats["lag/token"] == dict(sorted(expected.items()))
    assert stats["policy/num_trajectories"] == len(rows)  # the batch, not its passes


def test_micro_batches_of_a_minibatch_change_nothing(checkpoints):
    rows = fresh_rows(checkpoints["qwen3-tied"])
    many, _, _, _ = trained(checkpoints["qwen3-tied"], rows, max_tokens=30)
    few, _, _, _ = trained(checkpoints["qwen3-tied"], rows, max_tokens=4000)

    for name, parameter in few.items():
        torch.testing.assert_close(many[name], parameter, atol=2e-5, rtol=0, msg=name)


@pytest.mark.shows("learner.max_inference_tokens_per_device")
def test_passes_without_gradient_have_a_budget_of_their_own_which_changes_no_weight(checkpoints):
    rows, found = fresh_rows(checkpoints["qwen3-tied"]), []
    for budget in (None, 4000, 30):
        policy, passes = load_policy(checkpoints["qwen3-tied"]), []
        policy.register_forward_hook(lambda *_, passes=passes: passes.append(torch.is_grad_enabled()))
        trainer = trainer_of(policy, GROUP_STD, AREAL, num_minibatches=K, num_epochs=1, max_tokens=60)
        trainer.settings = replace(trainer.settings, max_inference_tokens=budget)
        trainer.train_batch(rows, in_minibatches(rows))
        found.append((passes.count(False), passes.count(True), torch.cat([p.flatten() for p in policy.parameters()])))
    (same, trained, weights), (one, *_), (many, *_) = found

    assert (same, one) == (trained, 1) and many > same and all(count == trained for _, count, _ in found)
    assert all(torch.allclose(other, weights, atol=2e-5, rtol=0) for _, _, other in found)
    few, each = (pack_minibatches(rows, plan_of(rows), 30, Ranks(), measured=range(len(rows)), max_measured_tokens=most)
                 for most in (4000, None))
    assert len(few[0]) == 2 < len(each[0])  # the first is empty: nothing has a gradient


@pytest.mark.parametrize(("words", "said"), [
    (["algorithm=ppo"], "is not for critic.kind=head, which keeps the states"),
    (["algorithm=dr_grpo"], "does nothing: these settings make no pass without gradient"),
    (["rollout.train.sampling.max_new_tokens=3000"], "=2000 on learner.mesh.context=1 ranks cannot hold the longest"),
])
def test_a_budget_of_passes_without_gradient_that_cannot_work_is_refused(words, said):
    words = ["policy.model_path=here", "learner.max_inference_tokens_per_device=2000", *words]
    with pytest.raises(ConfigError, match=said):
        check_losses(load_config(words))


@pytest.mark.shows("learner.num_epochs")
@pytest.mark.parametrize(("anchor", "surrogate"), [("loglinear", "decoupled_ppo"), ("behavior", "ppo_clip")])
def test_one_minibatch_and_one_epoch_are_the_single_step_of_before_bit_by_bit(checkpoints, anchor, surrogate):
    rows, loss = fresh_rows(checkpoints["qwen3-tied"]), replace(AREAL, anchor=anchor, surrogate=surrogate)
    loss = replace(loss, cap=None) if surrogate == "ppo_clip" else loss
    once, _, trainer, result = trained(checkpoints["qwen3-tied"], rows, loss=loss, num_epochs=1, plan=plan_of(rows))
    twice, _, _, _ = trained(checkpoints["qwen3-tied"], rows, loss=loss, num_epochs=2, plan=plan_of(rows))

    assert trainer.callbacks.inside == [] and len(result.steps) == 1 and not trainer.objective.needs
    assert any(not torch.equal(once[name], twice[name]) for name in once)


def test_the_loglinear_anchor_stays_where_the_first_step_put_it(checkpoints, monkeypatch):
    rows = fresh_rows(checkpoints["qwen3-tied"])
    seen = []
    policy, loss, plan = load_policy(checkpoints["qwen3-tied"]), replace(AREAL, anchor="loglinear"), plan_of(rows)

    def seen_loss(tokens, plan):
        seen.append((tokens.proximal.clone(), tokens.policy.detach().clone(), tokens.lags.clone()))
        return policy_term(tokens, plan)

    monkeypatch.setattr("learner.objective.loss.policy_term", seen_loss)
    trainer_of(policy, GROUP_STD, loss, num_epochs=3, schedule=Schedule("constant", LR, 8)).train_batch(rows, plan)

    anchors, policies, lags = zip(*seen, strict=True)
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    assert not torch.equal(policies[0], policies[1])
    assert torch.equal(lags[2] - lags[0], 2 * (lags[2] > 0).long())


def test_tokens_that_would_be_too_old_at_the_last_step_are_masked_at_every_step(checkpoints):
    rows = fresh_rows(checkpoints["qwen3-tied"])
    bound = 2  # on the lag at the first of the steps; the control has taken the others off
    plan = [msgspec.structs.replace(row, head_lag=0) for row in in_minibatches(rows)]
    _, stats, _, _ = trained(
        checkpoints["qwen3-tied"], rows, plan=plan, lag_policy=LagPolicy(mask_beyond=bound)
    )

    kept = sum(int((VERSION - row.versions[row.mask] <= bound).sum()) for row in rows)
    assert 0 < kept < sum(row.num_action_tokens for row in rows)
    assert sum(stats["lag/token"].values()) == E * kept and stats["lag/token_max"] <= bound + K * E - 1


def test_a_step_that_is_not_finite_is_left_out_and_the_others_are_done(checkpoints):
    rows = fresh_rows(checkpoints["qwen3-tied"])
    broken = [replace(row, rewards=row.rewards) for row in rows]
    broken[0].logprobs[broken[0].mask] = math.nan  # minibatch 0
    weights, stats, trainer, result = trained(checkpoints["qwen3-tied"], broken)

    assert [step.skipped for step in result.steps] == [True, False, True, False]
    assert result.num_skipped == 2 and not result.skipped and math.isfinite(result.grad_norm)
    assert all(parameter.isfinite().all() for parameter in weights.values())
    assert trainer.callbacks.inside == [7]


@pytest.mark.shows("learner.stop_kl")
def test_the_rest_of_a_batch_is_left_out_once_the_policy_has_moved_far_enough(checkpoints):
    rows, path = fresh_rows(checkpoints["qwen3-tied"]), checkpoints["qwen3-tied"]
    _, _, _, whole = trained(path, rows, num_epochs=4)
    policy = load_policy(path)
    trainer = trainer_of(policy, GROUP_STD, AREAL, num_minibatches=2, num_epochs=4, max_tokens=60)
    seen = []
    trainer.callbacks.lr_scale = lambda meter: seen.append(meter.value("drift/k3")) or 1.0
    trainer.train_batch(rows, in_minibatches(rows))
    assert len(whole.steps) == len(seen) == 8 and max(seen[:3]) < max(seen)
    bound = (max(seen[:3]) + seen[[x > max(seen[:3]) for x in seen].index(True)]) / 2
    last = [x > bound for x in seen].index(True)  # the step that measures more is the last one

    stopping = trainer_of(load_policy(path), GROUP_STD, AREAL, num_minibatches=2, num_epochs=4, max_tokens=60)
    stopping.settings = replace(stopping.settings, stop_kl=bound)
    found = stopping.train_batch(rows, in_minibatches(rows))
    steps = found.result.steps
    assert [step.left_out for step in steps] == [False] * (last + 1) + [True] * (7 - last) and 2 < last < 7
    assert stopping.version == VERSION + 8 and stopping.callbacks.inside == [VERSION + 1 + n for n in range(last)]
    assert found.result.num_skipped == 0 and not found.result.skipped
    assert found.result.grad_norm == pytest.approx(sum(s.grad_norm for s in steps[: last + 1]) / (last + 1))
    assert found.measured.flush(1)["policy/num_steps_left_out"] == 7 - last

    short = trainer_of(load_policy(path), GROUP_STD, AREAL, num_minibatches=2, num_epochs=4, max_tokens=60)
    number = iter(range(8))
    short.callbacks.lr_scale = lambda meter: float(next(number) <= last)
    short.train_batch(rows, in_minibatches(rows))
    pairs = zip(stopping.networks.policy.parameters(), short.networks.policy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "weights are those of the steps that were taken"


def test_a_kl_at_which_to_stop_needs_several_steps():
    words = ["experiment=quickstart", "learner.stop_kl=0.1"]
    load_config([*words, "learner.num_epochs=2"])
    with pytest.raises(ConfigError, match="learner.stop_kl=0.1 does nothing with one optimizer step per batch"):
        load_config(words)


@pytest.mark.parametrize(("when", "expected"), [("every_optimizer_step", [6]), ("every_step", [])])
def test_versions_inside_a_batch_are_published_only_if_asked_for(when, expected):
    run, published = SimpleNamespace(config=Config()), []
    run.config.publish.when, run.versions = PublishWhen(when), SimpleNamespace(publish=published.append)
    Run.stepped(run, 6)
    assert published == expected


def test_a_batch_counts_all_its_steps_unless_none_was_finite():
    done, broken = StepResult(1.0, False, 0.1), StepResult(math.nan, True, 0.1)
    assert BatchResult((done, broken)).num_skipped == 1 and not BatchResult((done, broken)).skipped
    assert BatchResult((StepResult(3.0, False, 0.2), done, broken)).grad_norm == 2.0
    assert BatchResult((broken, broken)).skipped and math.isnan(BatchResult((broken, broken)).grad_norm)


def test_a_ratio_inside_the_advantages_is_refused_where_several_steps_share_them():
    impala = AdvantageConfig(estimator="vtrace", baseline="none", rho_bar_pg=1.0)
    plain = LossConfig(surrogate="reinforce", veto_low=None, veto_high=None, dual_clip=None)
    Objective(impala, plain, max_new_tokens=16, max_lag=9)
    with pytest.raises(ConfigError, match="which 4 optimizer steps share.*loss.surrogate=ppo_clip"):
        Objective(impala, plain, max_new_tokens=16, max_lag=9, steps_per_batch=4)


def test_a_run_resumes_with_as_many_optimizer_steps_a_batch_as_it_had(tmp_path, monkeypatch):
    (tmp_path / "run_id").write_text("run")
    extra = {"run_id": "run", "lineage": [[1, 0, 8]], "wall_s": 1.0, "trained_tokens": 9, "steps_per_batch": 4}
    found = SimpleNamespace(path=tmp_path / "ckpt-00000008", version=8, extra=extra)
    monkeypatch.setattr("learner.checkpoint.checkpoint.find_checkpoint", lambda *_: found)

    def find(num_epochs):
        return find_resume_state(tmp_path, Ranks(), resume=True, num_minibatches=2, num_epochs=num_epochs)

    with pytest.raises(ConfigError, match="are 2 optimizer steps per batch, and .*was trained with 4: resume with as"):
        find(1)
    assert find(2).version == 8
