"""The memory of a run's processes from its settings and the model's config.json: learner ranks, engines, the host.

A learner rank is one step on fake tensors (`learner.fit.step`). Layers of one shape are counted with four and with six
of them: each end of each half of a step grows linearly with the layers, so the whole depth follows from both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from learner.fit.live_bytes import HOST
from learner.fit.models import config_of_model
from learner.fit.step import Job, step_peaks
from learner.model.paths import compute_dtype, wire_dtype
from learner.model.policy import decoder_layers
from learner.objective.options import needs_reference
from learner.ranks.mesh import Mesh
from streamrl.algorithms import find_estimator
from streamrl.config.schema import (
    AdvantageConfig,
    BesideTraining,
    ConstraintConfig,
    CriticConfig,
    CriticKind,
    KlConfig,
    LaunchConfig,
    LearnerConfig,
    LoraBase,
    LossConfig,
    PolicyConfig,
    PublishConfig,
    ReferenceConfig,
    RolloutConfig,
)
from streamrl.errors import ConfigError, describe

GIB = 1 << 30
RESERVED = int(1.5 * GIB)
"""The CUDA context, NCCL and cuBLAS on each GPU: assumed, as no GPU was measured."""
_DEPTHS = (4, 6)  # from four on, FSDP2 has as many layers gathered at once as it ever has
_PLAIN = ("sdpa", "eager")


class Sections(Protocol):
    """The sections of a run's settings that its memory depends on."""

    advantage: AdvantageConfig
    constraint: ConstraintConfig
    critic: CriticConfig
    kl: KlConfig
    launch: LaunchConfig
    learner: LearnerConfig
    loss: LossConfig
    policy: PolicyConfig
    publish: PublishConfig
    reference: ReferenceConfig
    rollout: RolloutConfig


class Uncounted(ConfigError):
    """A step of this model cannot be made on tensors without memory."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one learner rank holds at the peak of a step, by kind."""

    phase: str
    kinds: Mapping[str, int]
    trained: int  # parameters that the optimizer moves, of all ranks together
    checkpoint: int  # the host's copy of this rank's part of a checkpoint, written beside training; else 0
    offloaded: int = 0  # moments in host memory

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def __str__(self) -> str:
        """Format as one line, the largest kind first."""
        parts = sorted(self.kinds.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{kind} {nbytes / GIB:.1f}" for kind, nbytes in parts if nbytes > GIB // 20)
        return f"about {self.total / GIB:.1f} GiB for a learner rank ({listed})"


def job_of(config: Sections, *, longest: int, on_gpu: bool) -> Job:
    """The settings that a learner rank's memory depends on; `longest` as `longest_sequence` has it."""
    device, learner = torch.device("cuda" if on_gpu else "cpu"), config.learner
    dtype, rollout = compute_dtype(config.policy.dtype, device), config.rollout
    longest = min(longest, learner.max_row_tokens)
    batch = rollout.num_prompts_per_step * rollout.num_responses_per_prompt * longest
    mesh, lora = mesh_of(config), config.policy.lora.rank is not None
    copies = []
    if needs_reference(config.kl, config.constraint) and not (lora and config.reference.model_path is None):
        copies += [dtype] * (not config.reference.offload or not on_gpu)
    if config.loss.anchor == "ewma" and not lora:
        copies.append(torch.float32)
    wish = config.publish.beside_training
    beside = wish is BesideTraining.always or (wish is BesideTraining.auto and on_gpu)
    return Job(
        config.policy, mesh, on_gpu, dtype, longest=longest, chunk_tokens=learner.logprob_chunk_tokens,
        tokens=min(learner.max_row_tokens, max(longest, batch // mesh.dp_size)),
        flash=learner.attention.name not in _PLAIN,
        reduce_once=learner.reduce_once, reshard_after_forward=learner.reshard_after_forward,
        frozen_copies=tuple(copies),
        critic_model=find_estimator(config.advantage.estimator).needs_critic and config.critic.kind is CriticKind.model,
        snapshot=wire_dtype(config.publish.dtype, device) if beside else None,
    )


def mesh_of(config: Sections) -> Mesh:
    """The layout of the learner's ranks under `streamrl launch`. Raises ConfigError."""
    return Mesh.from_world_size(config.launch.num_learner_ranks, **vars(config.learner.mesh))


def rank_memory(job: Job, model_config: Any, *, whole_depth: bool = False) -> RankMemory:
    """The memory of one rank; a collective group of fake ranks is made for it, so none may exist.

    Args:
        whole_depth: count every layer, also where two depths would tell.
    """
    depth, alike = _layers(model_config)
    depths = [depth] if whole_depth or not alike or depth <= _DEPTHS[1] else list(_DEPTHS)
    try:
        found = [step_peaks(job, _with_layers(model_config, count, depth)) for count in depths]
    except ConfigError:
        raise
    except Exception as error:  # of the model's own code, such as a choice that depends on numbers
        raise Uncounted(f"the memory of {model_config.model_type} cannot be counted: {describe(error)}") from error
    (peaks, trained), (more, more_trained) = found[0], found[-1]
    factor = (depth - depths[0]) / (depths[1] - depths[0]) if len(depths) > 1 else 0.0
    whole = {phase: _line(peaks[phase], more[phase], factor) for phase in peaks}
    offloaded = max(kinds.pop(HOST, 0) for kinds in whole.values()) if job.on_gpu else 0
    phase = max(whole, key=lambda name: sum(whole[name].values()))
    kinds = whole[phase] | ({"CUDA context and libraries (assumed)": RESERVED} if job.on_gpu else {})
    trained += round((more_trained - trained) * factor)
    moments = kinds.get("moments", 0) + offloaded
    copied = 4 * trained / (job.mesh.shard * job.mesh.context * job.mesh.tensor) + moments if job.on_gpu else 0
    # `checkpoint.beside_training`; pinned memory comes in powers of two: measured 1.2 to 1.4
    return RankMemory(phase, kinds, trained, round(1.3 * copied), offloaded)


def num_parameters(model_config: Any) -> int:
    """Weights of the model, tied ones once."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(model_config).parameters())


def _line(one: Counter[str], other: Counter[str], factor: float) -> dict[str, int]:
    kinds = {kind: round(one[kind] + (other[kind] - one[kind]) * factor) for kind in one | other}
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes > 0}


def _layers(model_config: Any) -> tuple[int, bool]:
    """The number of layers, and whether all have parameters of the same shapes."""
    with torch.device("meta"):
        layers = decoder_layers(AutoModelForCausalLM.from_config(model_config))
    shapes = {tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers}
    depth = getattr(model_config.get_text_config(), "num_hidden_layers", None)
    return len(layers), len(shapes) == 1 and depth == len(layers)


def _with_layers(model_config: Any, count: int, depth: int) -> Any:
    """The configuration of a model with the first so many layers alone."""
    if count == depth:
        return model_config
    values = model_config.get_text_config().to_dict()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == depth:
            values[name] = value[:count]
    values["num_hidden_layers"] = count
    return type(model_config.get_text_config()).from_dict(values)


# --- an engine beside the learner -------------------------------------------------------------------------------------


UTILIZATION, WORKING = 0.92, 2 * GIB
"""Part of a GPU that vLLM plans with, and what of it passes and CUDA graphs take: assumed, not measured."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory of each GPU of an engine, in bytes."""

    tensor_parallel: int
    weights: int
    per_token: int  # of keys and values
    room: int  # for them
    graphs: int = 0  # of the native engine's decode steps

    def sequences(self, context: int) -> int:
        """The number of sequences of that length that are held at once."""
        return max(0, self.room // (self.per_token * context))


def engine_memory(
    model_config: Any, weights: int, memory: float, tensor_parallel: int, *, graphs: int = 0
) -> EngineMemory:
    """An engine in half precision over so many GPUs.

    Args:
        weights: of the whole model. memory: of each GPU that it may use.
        graphs: of the native engine (`graph_bytes`), which holds the weights twice; 0 with vLLM.
    """
    settings = model_config.get_text_config()
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    head = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    width = 2 * max(1, kv_heads // tensor_parallel) * head
    if rank := getattr(settings, "kv_lora_rank", None):  # latent attention caches one vector, whole on every GPU
        width = rank + settings.qk_rope_head_dim
    own = (2 if graphs else 1) * weights // tensor_parallel
    room = int(UTILIZATION * memory) - own - WORKING - graphs
    return EngineMemory(tensor_parallel, own, 2 * width * settings.num_hidden_layers, max(0, room), graphs)


def tensor_parallel_sizes(model_config: Any, most: int) -> list[int]:
    """Numbers of GPUs over which the heads can be divided, ascending."""
    settings = model_config.get_text_config()
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    return [n for n in (1, 2, 4, 8) if n <= most and heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


# --- the check before a run starts ------------------------------------------------------------------------------------


def check_memory(config: Sections, total_bytes: int, *, longest: int) -> RankMemory:
    """The memory that a rank needs of a GPU with so many bytes; `longest` as `longest_sequence` has it.

    Raises:
        ConfigError: more than the part of it that a rank may take.
        Uncounted: as `rank_memory`.
    """
    path, limit = str(config.policy.model_path), total_bytes * (config.learner.gpu_memory_share or 1.0)
    found = rank_memory(job_of(config, longest=longest, on_gpu=True), config_of_model(path))
    if found.total > limit:
        gib = total_bytes // GIB
        raise ConfigError(
            f"policy.model_path={path} needs {found} at the peak of its {found.phase}, and a rank may take "
            f"{limit / GIB:.1f} of {total_bytes / GIB:.1f} GiB: {_remedy(config)}. "
            f"`streamrl fit {path} --gpus N --memory {gib}GiB` proposes settings."
        )
    return found


def _remedy(config: Sections) -> str:
    """The setting that saves most of those not used yet."""
    policy, ranks = config.policy, config.launch.num_learner_ranks
    if not policy.gradient_checkpointing:
        return "set policy.gradient_checkpointing=true, or lower learner.max_tokens_per_device"
    if policy.lora.rank is None:
        return f"raise launch.num_learner_ranks={ranks}, or train an adapter with policy.lora.rank=32"
    if policy.lora.base_quantization is LoraBase.none:
        return f"raise launch.num_learner_ranks={ranks}, or set policy.lora.base_quantization=nf4"
    return "lower learner.max_tokens_per_device, or take a smaller model"
