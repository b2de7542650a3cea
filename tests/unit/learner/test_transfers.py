"""The host's waits for the device in a step: none in a pass, one a micro-batch for its statistics or its scores."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import learner.trainer
import streamrl
from learner.data.packing import MicroBatch
from learner.model.critic import Critic
from learner.objective.statistics import StepStatistics
from streamrl import recorded_group
from tests.kit.learning import tiny_checkpoint

READS = {
    Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__,
    Tensor.__index__, Tensor.nonzero, torch.nonzero, torch.bincount, torch.unique, torch.masked_select,
}


class FakeDeviceTensor(Tensor):
    """Stands for a tensor on a device: what is made of it is one, too, until the host reads it, which is counted."""

    num_reads = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # A `torch.device` is that of another tensor, which may be on the stand-in's.
        to_host = func is Tensor.to and "cpu" in [one for one in args if isinstance(one, str)]
        selects = func in (Tensor.__getitem__, Tensor.__setitem__) and any(
            isinstance(one, Tensor) and one.dtype == torch.bool
            for one in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        reads = func in READS or to_host
        FakeDeviceTensor.num_reads += reads or selects
        found = super().__torch_function__(func, types, args, kwargs)
        return found.as_subclass(Tensor) if reads and isinstance(found, Tensor) else found


def on_fake_device(value):
    """Tensors of a micro-batch, and of what it holds."""
    if isinstance(value, Tensor):
        return value.as_subclass(FakeDeviceTensor)
    return value


def batches(num_steps):
    """Groups of four short answers to one prompt, some of them of an older version."""
    rng = np.random.default_rng(7)

    def answer(index):
        size = int(rng.integers(3, 9))
        return rng.integers(4, 14, size).tolist(), (-2.6 + 0.3 * rng.standard_normal(size)).tolist(), index % 2

    for step in range(num_steps):
        yield [
            recorded_group(
                4 * step + number + 1, rng.integers(4, 14, 6).tolist(), [answer(index) for index in range(4)],
                version=max(0, step - int(rng.integers(0, 3))),
            )
            for number in range(4)
        ]


@pytest.mark.parametrize("words", [
    (), ("algorithm=dapo",), ("algorithm=extreme_lag",), ("algorithm=impala",),
    ("algorithm=grpo", "kl.mode=k2_is", "kl.coef=0.1", "staleness.mode=mask_old_tokens"),
    ("shadow.algorithms=[vespo,grpo]",),
    ("algorithm=vtrace", "advantage.whiten=batch", "advantage.rho_bar_ess_target=0.5"),
    ("algorithm=grpo", "advantage.baseline=opob", "advantage.scale=none", "advantage.whiten=batch"),
    ("algorithm=ppo", "kl.mode=reward_k1", "kl.coef=0.1", "critic.by_minibatch=true", "learner.num_minibatches=2"),
], ids=" ".join)
def test_a_micro_batch_is_read_once_and_no_pass_waits(monkeypatch, tmp_path, words):
    passes, finished, scored, fitted = [], [], [], []

    def counted(function, into):
        def call(*args, **kwargs):
            before = FakeDeviceTensor.num_reads
            found = function(*args, **kwargs)
            into.append(FakeDeviceTensor.num_reads - before)
            return found
        return call

    moved = MicroBatch.to
    monkeypatch.setattr(MicroBatch, "to", lambda self, device: replace(moved(self, device), **{
        one.name: on_fake_device(getattr(self, one.name)) for one in fields(self)
    }))
    monkeypatch.setattr(learner.trainer, "forward_backward", counted(learner.trainer.forward_backward, passes))
    monkeypatch.setattr(StepStatistics, "finish", counted(StepStatistics.finish, finished))
    monkeypatch.setattr(learner.trainer, "score_batch", counted(learner.trainer.score_batch, scored))
    monkeypatch.setattr(Critic, "fit", counted(Critic.fit, fitted))
    lengths = "rollout.max_prompt_tokens=8", "rollout.train.sampling.max_new_tokens=16"
    sizes = "learner.max_tokens_per_device=40", "trainer.num_steps=4"
    trainer = streamrl.Trainer(tiny_checkpoint(tmp_path / "model"), [*lengths, *sizes, *words])
    num_passes = 0
    for groups in batches(3):
        metrics = trainer.train(groups)
        assert (num_micro := len(passes) - num_passes) >= 3 and set(passes[num_passes:]) == {0}, passes
        assert 1 <= finished[-1] <= num_micro, (finished, metrics)
        assert scored[-1] <= num_micro, (scored, words)
        # With the critic's loss on each of up to two minibatches, and how many of its values were clipped.
        assert not fitted or fitted[-1] <= num_micro + 3, (fitted, words)
        num_passes = len(passes)
