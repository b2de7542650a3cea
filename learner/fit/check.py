"""The check before a run starts: refuse a learner that would run out of memory in a step."""

from __future__ import annotations

from learner.fit.estimate import GIB, RankMemory, Sections, job_of, rank_memory
from learner.fit.models import config_of_model
from streamrl.config.schema import LoraBase
from streamrl.errors import ConfigError


def check_memory(config: Sections, total_bytes: int, *, longest: int) -> RankMemory:
    """What a rank needs of a GPU with so many bytes; `longest` as `longest_sequence` has it.

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
    """What saves most of what is not used yet."""
    policy, ranks = config.policy, config.launch.num_learner_ranks
    if not policy.gradient_checkpointing:
        return "set policy.gradient_checkpointing=true, or lower learner.max_tokens_per_device"
    if policy.lora.rank is None:
        return f"raise launch.num_learner_ranks={ranks}, or train an adapter with policy.lora.rank=32"
    if policy.lora.base_quantization is LoraBase.none:
        return f"raise launch.num_learner_ranks={ranks}, or set policy.lora.base_quantization=nf4"
    return "lower learner.max_tokens_per_device, or take a smaller model"

