"""What a model needs of a GPU, from files and settings alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.model.memory import GIB, STATE_BYTES, check_memory, estimate_memory, tensor_shapes
from learner.model.optimizer import OPTIMIZERS, make_optimizer
from streamrl.config.schema import OptimizerConfig
from streamrl.errors import ConfigError
from tests.unit.config.setting_harness import config_of

pytestmark = pytest.mark.timeout(60)


def test_the_states_of_a_rank_are_what_its_tensors_hold(checkpoints):
    path = checkpoints["qwen3"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert sum(torch.Size(shape).numel() for _, shape in tensor_shapes(path)) == sum(
        p.numel() for p in model.parameters()
    )
    for name in ("adamw", "sgd"):
        optimizer = make_optimizer(model, OptimizerConfig(name=name))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moments = [m for state in optimizer.state.values() for m in state.values() if m is not None and m.dim()]
        held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
        found = estimate_memory(config_of(f"policy.optimizer.name={name}"), path)
        assert found.states == sum(tensor.nbytes for tensor in held)
    assert STATE_BYTES.keys() == OPTIMIZERS.keys()


def test_more_ranks_share_the_states_and_checkpointing_keeps_fewer_activations(checkpoints):
    one = estimate_memory(config_of("policy.gradient_checkpointing=false"), checkpoints["qwen3"])
    two = estimate_memory(
        config_of("launch.num_learner_ranks=2", "policy.gradient_checkpointing=true"), checkpoints["qwen3"]
    )
    assert two.states == one.states // 2 and two.gathered == one.gathered and two.activations < one.activations


@pytest.mark.shows("learner.gpu_memory_share")
def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(checkpoints):
    path, whole = checkpoints["qwen3"], config_of()
    least = estimate_memory(whole, path).least
    assert check_memory(whole, path, least).least == least and "GiB" in str(check_memory(whole, path, GIB))
    for words, total in (((), least - 1), (("learner.gpu_memory_share=0.5",), 2 * least - 2)):
        with pytest.raises(ConfigError, match="raise launch.num_learner_ranks=1"):
            check_memory(config_of(*words), path, total)
