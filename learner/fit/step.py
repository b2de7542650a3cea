"""One optimizer step of a learner rank on tensors without memory: the learner's own build, passes and optimizer.

A fake process group stands for the other ranks, so FSDP2 shards, gathers and reduces as it would; nothing is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AutoModelForCausalLM

from learner.checkpoint.model_files import materialize
from learner.data.layout import make_layout
from learner.fit.live_bytes import GRADIENTS, HOST, LiveBytes
from learner.fit.stand_ins import flash_attention, quantize
from learner.model.adapter.lora import add_adapter
from learner.model.attention.packed import ATTENTION, packed_attention
from learner.model.gradients import reduce_gradients
from learner.model.optimizer import make_optimizer
from learner.model.policy import Policy, assemble, decoder_layers, keep_gathered
from learner.ranks.mesh import Mesh, Ranks, local_part
from streamrl.architectures.attention import register
from streamrl.config.schema import LoraBase, PolicyConfig

_FLASH = f"{ATTENTION}_estimated"
AttentionInterface.register(_FLASH, partial(packed_attention, attention=flash_attention))
register(_FLASH)


@dataclass(frozen=True, slots=True)
class Job:
    """The inputs to the memory of a learner rank, beside the model.

    Attributes:
        on_gpu: half precision, sharded even on one rank, flash attention.
        tokens: of a micro-batch. longest: of a sequence.
        frozen_copies: types of other models that are only scored, as the reference.
        critic_model: the critic is a model of its own.
        snapshot: type of the copy from which a version is written beside training, or None.
    """

    policy: PolicyConfig
    mesh: Mesh
    on_gpu: bool
    dtype: torch.dtype
    tokens: int
    longest: int
    chunk_tokens: int = 1024
    flash: bool = True
    reduce_once: bool = False
    reshard_after_forward: bool = True
    frozen_copies: tuple[torch.dtype, ...] = ()
    critic_model: bool = False
    snapshot: torch.dtype | None = None


@contextmanager
def fake_ranks(mesh: Mesh, *, sharded: bool) -> Iterator[Ranks]:
    """Rank 0 of so many, of which no other exists; rank 0 has the largest shards."""
    if mesh.world == 1 and not sharded:
        yield Ranks()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    dist.init_process_group("fake", rank=0, world_size=mesh.world, store=FakeStore())
    try:
        with _meshes_of_numbers():
            yield Ranks(0, mesh, torch.device("cpu"), mesh.on_devices("cpu"), mesh.context_on_devices("cpu"))
    finally:
        dist.destroy_process_group()


@contextmanager
def _meshes_of_numbers() -> Iterator[None]:
    """Inside, FSDP2 may join its axis and the tensor axis: it looks into a tensor of ranks, which must not be fake."""
    join = DeviceMesh._concatenate

    def joined(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(meshes)

    DeviceMesh._concatenate = staticmethod(joined)
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)


def step_peaks(job: Job, model_config: Any) -> tuple[dict[str, Counter[str]], int]:
    """Bytes by kind at the peak of every phase of a step, and the number of weights that are trained."""
    vocabulary, plain = int(model_config.get_text_config().vocab_size), replace(job, policy=PolicyConfig())
    # Without a device first: what peft does to layers cannot be done to fake tensors.
    model, others = _model(job, model_config), [_model(plain, model_config, dtype) for dtype in job.frozen_copies]
    critics = [_model(plain, model_config)] * job.critic_model
    with (
        fake_ranks(job.mesh, sharded=job.on_gpu) as ranks,
        FakeTensorMode(allow_non_fake_inputs=True),
        LiveBytes(vocabulary) as live,
    ):
        policy = _policy(job, model, ranks)
        if not job.reshard_after_forward:
            keep_gathered(policy)
        live.label("parameters", [*policy.parameters(), *policy.buffers()], again=True)
        beside = [_policy(plain, other, ranks).requires_grad_(False) for other in others]
        live.label("frozen models", (p for other in beside for p in other.parameters()), again=True)
        critic = _policy(plain, critics[0], ranks) if critics else None
        optimizer = _with_moments(job, policy, live)
        more = [] if critic is None else [critic, _with_moments(job, critic, live)]
        if critic is not None:
            live.label("critic", critic.parameters(), again=True)
            critic.zero_grad(set_to_none=True)
        trained = [p for p in policy.parameters() if p.requires_grad]
        copies = [] if job.snapshot is None else [local_part(p.detach()).to(job.snapshot, copy=True) for p in trained]
        live.label("snapshot for publishing", copies, again=True)
        if job.reduce_once and job.mesh.world > 1:
            reduce_gradients(policy, False)
            _pass(job, policy, live)
            reduce_gradients(policy, True)
        _pass(job, policy, live)
        live.label(GRADIENTS, (p.grad for p in trained if p.grad is not None), again=True)
        live.begin("optimizer")
        optimizer.step()
        del more
        return live.peaks(), sum(p.numel() for p in trained)


def _model(job: Job, model_config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model without memory, with its adapter."""
    lora = job.policy.lora
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=ATTENTION)
        if lora.rank is not None:
            if lora.base_quantization is not LoraBase.none:
                quantize(model, lora.base_quantization)
            add_adapter(Policy(model), replace(lora, base_quantization=LoraBase.none), seed=0, dtype=job.dtype)
    return model


def _policy(job: Job, model: Any, ranks: Ranks) -> Policy:
    """The policy as `load_policy` builds it, and this rank's part of it as fake tensors."""
    policy = assemble(
        model, ranks, dtype=job.dtype, gradient_checkpointing=job.policy.gradient_checkpointing,
        chunk_tokens=job.chunk_tokens,
    )
    if ranks.fsdp_mesh is None:
        materialize(policy, ranks.device)
        model.tie_weights()
    if job.on_gpu and job.flash:
        model.set_attn_implementation(_FLASH)
    return policy


def _with_moments(job: Job, module: Policy, live: LiveBytes) -> torch.optim.Optimizer:
    """The optimizer after a first step; gradients stay, as those of the micro-batches before."""
    optimizer = make_optimizer(module, job.policy.optimizer)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            live.label(GRADIENTS, [parameter.grad], again=True)
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    kind = HOST if job.policy.optimizer.offload else "moments"
    live.label(kind, (value for value in states if isinstance(value, torch.Tensor)), again=True)
    return optimizer


def _pass(job: Job, policy: Policy, live: LiveBytes) -> None:
    """Forward and backward of a full micro-batch; the backward pass in two halves, each with a peak at one end."""
    layers = decoder_layers(policy.model)

    def halfway(_: Any, __: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        hidden.register_hook(lambda _: live.begin("backward pass, second half"))

    hook = layers[len(layers) // 2 - 1].register_forward_hook(halfway) if layers else None
    whole, rest = divmod(job.tokens, job.longest)
    lengths = [job.longest] * whole + [rest] * bool(rest)
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.zeros(job.tokens, dtype=torch.long)
    live.begin("forward pass")
    logprobs, entropy = policy(
        tokens, positions, make_layout(lengths), torch.arange(job.tokens), tokens, torch.ones(job.tokens)
    )
    live.begin("backward pass, first half")
    (logprobs.sum() + entropy.sum()).backward()
    if hook is not None:
        hook.remove()
