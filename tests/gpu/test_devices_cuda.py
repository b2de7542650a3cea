"""Devices, memory and number types that only a GPU can show: each fails without what it is about."""

import os
from statistics import fmean

import pytest
import torch

from actors.engines.native.forward import wide_logits
from actors.engines.vllm.process import utilization
from learner.model.optimizer import allocate_moments, make_optimizer
from learner.model.tiny import make_tiny_model
from learner.ranks.mesh import Ranks
from learner.setup.device import limit_gpu_memory
from streamrl.config.schema import OptimizerConfig
from streamrl.gpus import gpu_of, read_gpus
from streamrl.weights.gpu.cuda_memory import CudaMemory, device_id, free_bytes
from tests.gpu.device import finish, needs_gpu, start

pytestmark = [*needs_gpu, pytest.mark.timeout(300)]
MIB = 1 << 20


def test_a_gpu_has_one_name_in_every_process_and_for_every_transport():
    here = device_id("cuda")
    assert here.startswith(os.uname().nodename[:20] + "|") and len(here) <= 64
    assert CudaMemory("cuda").device_id == here
    script = "from streamrl.weights.gpu.cuda_memory import device_id; print(device_id('cuda'))"
    assert finish(start(script)).strip() == here


def test_the_driver_lists_the_gpu_that_torch_uses_with_its_memory():
    found = gpu_of("cuda")
    if not read_gpus():
        pytest.skip("nvidia-smi is not there")
    assert found is not None and str(torch.cuda.get_device_properties(0).uuid) in found.uuid
    assert abs(found.total_bytes - torch.cuda.mem_get_info(0)[1]) < 2 << 30
    assert 0 < utilization(found, 0.5, 0, 1) <= 0.5


def test_a_rank_is_bound_to_its_gpu_and_agrees_with_itself():
    ranks = Ranks.start("cuda")
    try:
        assert ranks.device == torch.device("cuda", 0) and ranks.maximum(3.0) == 3.0
        ranks.barrier()
    finally:
        ranks.close()


SEGMENTS = """
from learner.__main__ import prepare_allocator
prepare_allocator()
import torch
torch.ones(1, device="cuda")
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""


def test_the_learners_allocator_has_expandable_segments():
    assert finish(start(SEGMENTS)).strip() == "True"


KEPT = """
total = torch.cuda.mem_get_info(0)[1]
torch.empty(int(0.05 * total), dtype=torch.uint8, device="cuda")
try:
    torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
    print("took more")
except torch.OutOfMemoryError:
    print("kept to it")
"""
SHARE = """
import torch
from learner.setup.device import limit_gpu_memory
limit_gpu_memory(0.1, torch.device("cuda", 0))
""" + KEPT
ACTOR_SHARE = """
import sys
from pathlib import Path
import torch
from actors.engines.base import EngineSpec
from actors.engines.native.engine import NativeEngine
NativeEngine.from_spec(EngineSpec(
    model_dir=Path(sys.argv[1]), tokenizer=None, max_num_seqs=2, max_tokens=8, max_new_tokens=4, device="cuda",
    memory_share=0.1,
))
""" + KEPT


def test_a_share_of_a_gpu_is_kept_to():
    assert finish(start(SHARE)).strip() == "kept to it"
    limit_gpu_memory(None, torch.device("cuda", 0))


def test_moments_are_allocated_before_the_first_step():
    torch.nn.Linear(8, 8, device="cuda")(torch.ones(1, 8, device="cuda")).sum().backward()  # workspaces of cuBLAS
    torch.cuda.empty_cache()
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = make_optimizer(model, OptimizerConfig())
    allocate_moments(optimizer)
    before = torch.cuda.memory_reserved()
    model(torch.ones(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    assert before >= 4 * 4096 * 4096 * 4 and torch.cuda.memory_reserved() <= before + 4 * MIB


def test_memory_that_the_driver_does_not_have_is_out_of_memory_and_not_a_broken_document():
    with pytest.raises(torch.OutOfMemoryError):
        CudaMemory("cuda").create(1 << 50)
    free = free_bytes(torch.device("cuda", 0))
    assert free is not None and 0 < free <= torch.cuda.mem_get_info(0)[1]


def test_logits_of_half_precision_come_out_in_float32():
    head = torch.nn.Linear(1024, 32_000, bias=False, device="cuda", dtype=torch.bfloat16)
    head.weight.data.normal_(std=0.5)
    hidden = torch.randn(7, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = hidden.double() @ head.weight.double().T
        rounded, wide = head(hidden).double(), wide_logits(head, hidden)
    assert wide.dtype == torch.float32
    assert float((wide.double() - exact).abs().mean()) < 0.01 * float((rounded - exact).abs().mean())


def test_an_actor_samples_with_the_log_probs_that_the_learner_computes():
    """Within rounding: both are as far from float32 as one plain pass in bfloat16, and no farther from each other."""
    from bench.gpu_learner import measure_lag_zero

    found = measure_lag_zero("0.6b", 8, 64, seed=0)
    plain = fmean(found.plain)
    assert plain > 0 and fmean(found.actor) < 1.25 * plain and fmean(found.learner) < 1.25 * plain
    assert fmean(found.actor_to_learner) < 1.75 * plain  # independent errors differ by 1.41 of one


def test_a_share_of_an_actor_holds_for_a_device_without_a_number(tmp_path):
    model = make_tiny_model(tmp_path, characters="abc", hidden_size=32, num_layers=1, num_heads=2)
    assert finish(start(ACTOR_SHARE, str(model))).strip() == "kept to it"
