"""Rules on engines and devices: what contradicts itself, and which GPUs the processes of a launched run get."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

from streamrl.config.schema import Config, SamplingConfig
from streamrl.errors import ConfigError
from streamrl.gpus import Placement, place, read_gpus, visible_gpus

CANDIDATE_BYTES = 116
"""Bytes that vLLM 0.32 holds for an id that a token might have been, with its log-prob: Python numbers in lists."""
NUM_MORE_CANDIDATES = 17
"""Ids of each token beyond those that may be left: the engine asks for 16 more, for ties, and gets the drawn one."""
MAX_CANDIDATE_BYTES = 8 << 30
"""The most that such ids may take in one actor."""


def gpus_per_engine(config: Config) -> int:
    """GPUs that the engine of one actor computes on, where it computes on GPUs."""
    if config.actors.engine != "vllm":
        return config.launch.gpus_per_actor or 1 if ":" in config.actors.engine else 1
    given = config.actors.vllm
    return int(given.get("tensor_parallel_size", 1)) * int(given.get("pipeline_parallel_size", 1))


def choose_engine(config: Config) -> tuple[str, str]:
    """The engine that `actors.engine=auto` is here, and why; no reason is given where no GPU leaves a choice."""
    if config.actors.device == "cpu" or not read_gpus() or not visible_gpus(os.environ):
        return "native", ""
    if config.policy.tiny.enabled:
        return "native", "the model is tiny"
    if importlib.util.find_spec("vllm") is None:
        return "native", "vLLM is not installed here (docs/vllm.md)"
    try:
        check_engine(replace(config, actors=replace(config.actors, engine="vllm")))
    except ConfigError as error:
        return "native", str(error)
    return "vllm", "it is installed, and a GPU is visible"


def check_engine(config: Config) -> None:
    """Raise ConfigError for the first setting that the actors' engine cannot serve."""
    if config.actors.weights != "full" and config.actors.engine != "native":
        raise ConfigError(
            f"actors.weights={config.actors.weights} is rounded by the native engine alone, and actors.engine is "
            f"{config.actors.engine}: vLLM has actors.vllm.quantization, or leave actors.weights=full"
        )
    sampling = config.rollout.train.sampling
    if config.actors.engine == "vllm" and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0):
        _check_candidates(sampling, config.actors.num_concurrent)


def _check_candidates(sampling: SamplingConfig, num_concurrent: int) -> None:
    """Raise ConfigError if the ids that vLLM names for each token would fill the actor's memory."""
    num_bytes = num_concurrent * sampling.max_new_tokens * CANDIDATE_BYTES
    most = MAX_CANDIDATE_BYTES // num_bytes - NUM_MORE_CANDIDATES
    key = "top_k" if sampling.top_k > 0 else "max_kept"
    if (kept := getattr(sampling, key)) > most:
        lower = f"set it to {most} or less, or" if most > 0 else "no number is small enough:"
        raise ConfigError(
            f"rollout.train.sampling.{key}={kept} with actors.engine=vllm: vLLM holds so many ids of each token and "
            f"{NUM_MORE_CANDIDATES} more until its answer ends, {CANDIDATE_BYTES} bytes each, and "
            f"actors.num_concurrent={num_concurrent} answers of {sampling.max_new_tokens} tokens would take "
            f"{num_bytes * (kept + NUM_MORE_CANDIDATES) / 1e9:.0f} GB of an actor's memory: {lower} have fewer or "
            "shorter answers"
        )


def check_ranks(config: Config) -> None:
    """Raise ConfigError unless every learner rank gets groups to train on."""
    groups, num = config.rollout.num_prompts_per_step, config.learner.num_minibatches
    same = config.learner.mesh.tensor * config.learner.mesh.context  # ranks that get the same groups
    shares = config.launch.num_learner_ranks // same or 1
    if shares > groups:
        raise ConfigError(
            f"launch.num_learner_ranks={config.launch.num_learner_ranks} divide rollout.num_prompts_per_step={groups} "
            f"groups into {shares} parts: ranks train whole groups, some would have none; use fewer, or more prompts"
        )
    if num > 1 and groups // num < shares:
        raise ConfigError(
            f"learner.num_minibatches={num} leaves {groups // num} of rollout.num_prompts_per_step={groups} groups to "
            f"a minibatch, which launch.num_learner_ranks={config.launch.num_learner_ranks} divide into {shares}: "
            "every rank needs one of each; use fewer minibatches, or more prompts"
        )
    if same > 1 and "://" in str(config.distill.teacher):
        raise ConfigError(
            f"distill.teacher={config.distill.teacher}: learner ranks that train on the same groups would each ask "
            "and get other answers; give the teacher's checkpoint, or divide the model by learner.mesh.shard alone"
        )


def check_devices(config: Config) -> None:
    """Raise ConfigError, with the setting, its value and the remedy, for the first rule that is broken."""
    launch, actors, engine = config.launch, config.actors, gpus_per_engine(config)
    if ":" in config.run.device:
        raise ConfigError(
            f"run.device={config.run.device}: ranks take the GPUs that they see by number: set run.device=cuda, and "
            "CUDA_VISIBLE_DEVICES to the ones of the learner"
        )
    if config.policy.dtype == "float16":
        raise ConfigError(
            f"policy.dtype={config.policy.dtype} would need scaled losses, which the learner lacks: take bfloat16"
        )
    if launch.gpus_per_actor is not None and actors.device == "cpu":
        raise ConfigError(
            f"launch.gpus_per_actor={launch.gpus_per_actor} with actors.device=cpu: leave one of them out"
        )
    if launch.gpus_per_actor not in (None, engine):
        raise ConfigError(
            f"launch.gpus_per_actor={launch.gpus_per_actor}, but the engine of an actor computes on {engine}: set "
            f"actors.vllm.tensor_parallel_size={launch.gpus_per_actor} under actors.engine=vllm, or leave it out"
        )
    if ":" in actors.device and (engine > 1 or launch.gpus_per_actor is not None or launch.share_gpus is False):
        raise ConfigError(
            f"actors.device={actors.device} puts every actor on that one GPU, against launch.gpus_per_actor="
            f"{launch.gpus_per_actor}, launch.share_gpus={launch.share_gpus} or an engine on {engine}: set "
            "actors.device=cuda"
        )
    if actors.gpu_memory_share is not None and "gpu_memory_utilization" in actors.vllm:
        raise ConfigError(
            f"actors.gpu_memory_share={actors.gpu_memory_share} and actors.vllm.gpu_memory_utilization say the same: "
            "leave one of them out"
        )


def check_in_process(config: Config) -> None:
    """Raise ConfigError, with the remedy, for what a run in one process does not have."""
    launch, actors = config.launch, config.actors
    if launch.debug and not launch.in_process:
        raise ConfigError("launch.debug=true is for a run in one process: add launch.in_process=true, or take the "
                          "command streamrl debug")
    wanted = {
        "launch.num_actors": (launch.num_actors, (1,)), "launch.num_learner_ranks": (launch.num_learner_ranks, (1,)),
        "launch.standby_learner": (launch.standby_learner, (False,)), "actors.engine": (actors.engine, ("native",)),
        "run.device": (config.run.device, ("cpu", "auto")), "actors.device": (actors.device, ("cpu", "auto")),
    }
    for key, (got, allowed) in wanted.items() if launch.in_process else ():
        if got not in allowed:
            raise ConfigError(
                f"launch.in_process=true runs one learner and one actor with the native engine on the CPU, and {key} "
                f"is {got}: add {key}={str(allowed[0]).lower()}, or leave launch.in_process out"
            )


def placement_of(config: Config, gpus: Sequence[str]) -> Placement:
    """The GPUs that the learner and each actor get of these; none where the settings keep them on a CPU.

    Raises ConfigError: too few GPUs, and the settings do not let processes share them.
    """
    launch, on_gpu, named = config.launch, config.actors.device in ("auto", "cuda"), "cuda" in (
        config.run.device, config.actors.device
    )
    if not gpus:
        if launch.gpus_per_actor is not None or launch.share_gpus:
            raise ConfigError(
                f"launch.gpus_per_actor={launch.gpus_per_actor} and launch.share_gpus={launch.share_gpus}, but no GPU "
                "is visible here: leave them out, or check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
            )
        return Placement()
    num_ranks = 0 if config.run.device == "cpu" else launch.num_learner_ranks
    if not named:
        num_ranks = min(num_ranks, len(gpus))
    return place(
        gpus, num_ranks=num_ranks, num_actors=launch.num_actors,
        per_actor=gpus_per_engine(config) if on_gpu and launch.num_actors else 0,
        share=not named if launch.share_gpus is None else launch.share_gpus,
        learner_share=config.learner.gpu_memory_share, actor_share=config.actors.gpu_memory_share,
    )
