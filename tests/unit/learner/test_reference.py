"""The frozen copy: it never learns, follows only when told to, and survives a restart; sharded or not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.data.packing import empty_micro_batch, pack
from learner.model.optimizer import make_optimizer
from learner.model.policy import load_policy
from learner.model.reference import FrozenPolicy, load_reference
from learner.ranks.mesh import Ranks, local_part
from streamrl.config.schema import OptimizerConfig, ReferenceConfig
from streamrl.errors import ConfigError
from tests.unit.learner.learner_factories import batch, tiny_checkpoint

pytestmark = pytest.mark.timeout(60)
MICRO = pack(batch(2, 2), 500)[0]


@pytest.fixture(params=["one process", "sharded", "half precision", "offloaded"])
def how(request):
    """Keyword arguments of `load_policy`."""
    ranks = Ranks() if request.param == "one process" else Ranks.start("cpu", sharded=True)
    yield {"ranks": ranks, "dtype": torch.bfloat16 if request.param == "half precision" else torch.float32}
    ranks.close()


@pytest.fixture
def ranks(how):
    return how["ranks"]


@pytest.fixture
def pair(checkpoints, how, request):
    """A policy and a frozen copy of its start."""
    directory, offload = checkpoints["qwen3-tied"], request.node.callspec.params["how"] == "offloaded"
    copy = load_policy(directory, **how, offload=offload)
    return load_policy(directory, **how), FrozenPolicy(copy, name="reference")


def score(policy) -> torch.Tensor:
    inputs = (MICRO.tokens, MICRO.positions, MICRO.packing, MICRO.score_index, MICRO.targets, MICRO.temperatures)
    return policy(*inputs)[0]


@torch.no_grad()
def disturb(policy) -> None:
    for parameter in policy.parameters():
        part = local_part(parameter)
        part.add_(0.05 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))


def train(policy) -> torch.Tensor:
    """One step of gradient descent; the scores before it."""
    logprobs = score(policy)
    logprobs.sum().backward()
    torch.optim.SGD(policy.parameters(), lr=1e-2).step()
    policy.zero_grad()
    return logprobs.detach()


def test_a_copy_scores_as_the_policy_did_and_stays_when_the_policy_learns(pair):
    policy, reference = pair
    start = train(policy)

    for _ in range(2):
        torch.testing.assert_close(reference.score(MICRO), start, atol=1e-6, rtol=0)
    assert not reference.score(MICRO).requires_grad
    assert float((score(policy).detach() - start).abs().max()) > 1e-3


def test_after_a_sync_it_scores_as_the_policy_does_now_and_then_stays_again(pair):
    policy, reference = pair
    reference.score(MICRO)
    train(policy)
    reference.sync(policy)

    now = train(policy)
    torch.testing.assert_close(reference.score(MICRO), now, atol=1e-6, rtol=0)


def test_a_blend_keeps_the_share_that_decay_says(pair):
    policy, reference = pair
    reference.score(MICRO)  # what the forward pass gathered must not hide the change
    before = {key: local_part(tensor).clone() for key, tensor in reference.tensors()}
    disturb(policy)

    reference.blend(policy, decay=0.75)

    weights = {name: local_part(p.detach()) for name, p in policy.named_parameters()}
    for key, tensor in reference.tensors():
        expected = 0.75 * before[key] + 0.25 * weights[key.removeprefix("frozen/reference/")]
        torch.testing.assert_close(local_part(tensor), expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"decay=1.5"):
        reference.blend(policy, decay=1.5)


def test_a_copy_that_has_moved_comes_back_from_a_checkpoint(tmp_path, pair, checkpoints, ranks, how):
    policy, reference = pair
    optimizer = make_optimizer(policy, OptimizerConfig())
    options = {"extra": {}, "blobs": {}, "num_keep": 1}
    save_checkpoint(tmp_path / "without", 1, policy, optimizer, ranks, **options)
    disturb(policy)
    reference.sync(policy)
    moved = reference.score(MICRO)
    save_checkpoint(tmp_path / "with", 1, policy, optimizer, ranks, **options, also=reference.tensors())
    fresh = FrozenPolicy(load_policy(checkpoints["qwen3-tied"], **how), name="reference")

    assert fresh.restore(find_checkpoint(tmp_path / "without", ranks).shards()) is False
    start = fresh.score(MICRO)
    assert fresh.restore(find_checkpoint(tmp_path / "with", ranks).shards()) is True
    assert torch.equal(fresh.score(MICRO), moved) and not torch.allclose(start, moved, atol=1e-3)


@pytest.mark.shows("reference.offload")
@pytest.mark.parametrize("how", ["sharded", "half precision"], indirect=True)
def test_a_reference_in_host_memory_scores_bit_for_bit_as_one_on_the_device(checkpoints, how):
    start, policy = checkpoints["qwen3-tied"], load_policy(checkpoints["qwen3-tied"], **how)
    plain, offloaded = (
        load_reference(ReferenceConfig(offload=offload), start, policy, passes={}, **how) for offload in (False, True)
    )
    assert torch.equal(plain.score(MICRO), offloaded.score(MICRO))
    units = [unit for unit in offloaded._policy.modules() if isinstance(unit, FSDPModule)]
    policies = [unit._get_fsdp_state()._fsdp_param_group.offload_policy for unit in units]
    assert len(units) == 3 and all(isinstance(one, CPUOffloadPolicy) for one in policies)


def test_an_empty_micro_batch_is_scored_to_nothing(pair):
    assert pair[1].score(empty_micro_batch()).shape == (0,)


def test_a_model_of_another_shape_cannot_follow_the_policy(tmp_path, pair):
    policy, reference = pair
    other = FrozenPolicy(load_policy(tiny_checkpoint(tmp_path, "gpt2")), name="reference")

    reference.check_same_parameters(policy)
    with pytest.raises(ConfigError, match="reference model cannot follow the policy"):
        other.check_same_parameters(policy)
