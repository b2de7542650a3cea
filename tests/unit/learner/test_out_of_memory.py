"""A micro-batch that does not fit into memory: split and trained as if it had been two from the start, or refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from learner.data.packing import pack
from learner.data.resized import check_split
from learner.model.networks import Networks
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import decoder_layers, load_policy
from learner.objective.objective import Objective
from learner.ranks.mesh import Mesh, Ranks
from learner.trainer import Trainer, TrainerSettings, forward_backward
from streamrl.config.schema import AdvantageConfig, LossConfig, OptimizerConfig
from streamrl.errors import ConfigError
from tests.kit.learning import batch, plan_of
from tests.unit.learner.test_trainer import trained_alone

PLAIN = LossConfig(veto_low=None, veto_high=None)


class FakeMemory:
    """Raises torch's own error in given passes of a policy's first layer, counted from 0 over both halves of a pass."""

    def __init__(self, policy, *, forward=(), backward=(), longest=None):
        self.forward, self.backward, self.longest, self.passes = forward, backward, longest, 0
        decoder_layers(policy.model)[0].register_forward_hook(self._passed)

    def _passed(self, _, inputs, out):
        if not torch.is_grad_enabled():
            return
        number, hidden = self.passes, out[0] if isinstance(out, tuple) else out
        self.passes += 1
        if number in self.forward or (self.longest and hidden.shape[1] > self.longest):
            raise torch.OutOfMemoryError("a fake: CUDA out of memory. Tried to allocate 1 GiB.")
        if number in self.backward:  # the layer above has its gradients by then
            hidden.register_hook(self._fail)

    def _fail(self, _):
        raise torch.OutOfMemoryError("a fake: CUDA out of memory. Tried to allocate 1 GiB.")


@pytest.fixture(params=["one process", "FSDP2"])
def ranks(request):
    made = Ranks() if request.param == "one process" else Ranks.start("cpu", sharded=True)
    yield made
    made.close()


def trained(directory, rows, ranks, *, loss=PLAIN, memory=None, max_tokens=60, **settings):
    """(what a step of plain gradient descent did to the weights, what it measured, the fake memory)."""
    policy = load_policy(directory, ranks=ranks)
    fake = (memory or FakeMemory)(policy)
    objective = Objective(
        AdvantageConfig(), loss, max_new_tokens=16, max_lag=9, steps_per_batch=settings.get("num_epochs", 1)
    )
    one = Trainer(
        Networks(policy, make_optimizer(policy, OptimizerConfig(name="sgd", lr=1.0))), Schedule("constant", 1.0, 8),
        objective, TrainerSettings(max_tokens, max_grad_norm=0.0, **settings), ranks, version=5,
    )
    before = [p.detach().clone() for p in policy.parameters()]
    found = one.train_batch(rows, plan_of(rows)).measured.flush(1)
    moved = [b - p.detach() for b, p in zip(before, policy.parameters(), strict=True)]
    return [part.full_tensor() if ranks.device_mesh else part for part in moved], found, fake


CASES = [dict(forward=(0,)), dict(backward=(0,)), dict(backward=(2,)), dict(forward=(1,), backward=(3,))]


@pytest.mark.parametrize("fails", CASES, ids=str)
def test_a_pass_without_memory_is_split_and_the_gradients_are_those_of_the_whole(checkpoints, ranks, fails):
    rows = batch(4, 3)
    expected, plain, fake = trained(checkpoints["qwen3-tied"], rows, ranks)
    assert fake.passes == plain["policy/num_microbatches"] > 2 and plain["policy/num_split_microbatches"] == 0

    got, found, fake = trained(checkpoints["qwen3-tied"], rows, ranks, memory=partial(FakeMemory, **fails))

    splits = sum(map(len, fails.values()))
    assert found.pop("policy/num_split_microbatches") == splits
    assert found.pop("policy/num_microbatches") == plain["policy/num_microbatches"] + splits
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    for key, value in found.items():
        assert value == pytest.approx(plain[key], rel=1e-4, abs=1e-6) or "time" in key, key


@pytest.mark.parametrize("ranks", ["FSDP2"], indirect=True)
@pytest.mark.parametrize("settings", [dict(num_epochs=2), dict(reduce_once=True)], ids=str)
def test_later_epochs_and_what_a_scoring_pass_found_follow_the_split(checkpoints, ranks, settings):
    rows, loss = batch(3, 4), replace(PLAIN, surrogate="decoupled_ppo", anchor="recomputed")
    loss = replace(loss, dual_clip=None)
    expected, _, fake = trained(checkpoints["qwen3-tied"], rows, ranks, loss=loss, **settings)
    once = fake.passes

    memory = partial(FakeMemory, backward=(1,))
    got, found, fake = trained(checkpoints["qwen3-tied"], rows, ranks, loss=loss, memory=memory, **settings)

    assert found["policy/num_split_microbatches"] == 1
    assert fake.passes == once + 2 + settings.get("num_epochs", 1)  # two again, and one more in each epoch
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_a_micro_batch_is_halved_until_it_fits(checkpoints):
    rows = batch(4, 4)
    expected, _, _ = trained(checkpoints["llama-tied"], rows, Ranks(), max_tokens=4000)
    longest = max(row.num_tokens for row in rows)
    got, found, _ = trained(
        checkpoints["llama-tied"], rows, Ranks(), max_tokens=4000, memory=partial(FakeMemory, longest=longest)
    )

    assert found["policy/num_split_microbatches"] > 2
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_a_trajectory_that_does_not_fit_is_refused_with_the_settings_that_help(checkpoints):
    with pytest.raises(ConfigError, match=r"by itself: set policy.gradient_checkp.*max_new_tokens.*a fake"):
        trained(checkpoints["llama-tied"], batch(2, 2), Ranks(), memory=partial(FakeMemory, longest=1))


def test_several_ranks_split_nothing_and_say_what_helps():
    whole = pack(batch(2, 2), 500)[0]
    with pytest.raises(ConfigError, match=r"learner rank 1; with several ranks, .*lower learner.max_tokens_per_device"):
        check_split(whole, "CUDA out of memory", Ranks(1, Mesh(1, 2)), possible=True)
    check_split(whole, "CUDA out of memory", Ranks(), possible=True)


@pytest.mark.parametrize("words", [("algorithm=ppo",), ("kl.mode=k2_is", "kl.coef=0.1")], ids=["critic", "reference"])
def test_a_run_with_a_critic_or_a_reference_trains_the_same_after_a_split(tmp_path, monkeypatch, words):
    plain, _ = trained_alone(tmp_path, *words)
    calls = []

    def fake_lack_of_memory(*args):
        calls.append(None)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("a fake: CUDA out of memory")
        return forward_backward(*args)

    monkeypatch.setattr("learner.trainer.forward_backward", fake_lack_of_memory)
    weights, results = trained_alone(tmp_path, *words)
    assert results[0].measured.flush(1)["policy/num_split_microbatches"] == 1
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, atol=2e-5, rtol=1e-3, msg=name)
