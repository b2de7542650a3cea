"""Rules on engines and devices: what contradicts itself, what `auto` means here, and which GPUs processes get."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from streamrl.config.schema import Config, RolloutConfig, RolloutWeights, SamplingConfig
from streamrl.errors import ConfigError
from streamrl.gpus import Placement, place, usable_gpus

AUTO, ON_HOST = ["auto"], ("shm", "zmq")
"""Transports by device, and those that need none."""
PLANNED = NEW_TOKENS, BUDGET, RECOMPUTE, COMPILE, CONCURRENT = (
    "rollout.train.sampling.max_new_tokens", "learner.max_tokens_per_device", "policy.gradient_checkpointing",
    "learner.compile", "actors.num_concurrent",
)
"""Settings that the planner (`learner.fit`) chooses for a model on a GPU; elsewhere their defaults hold."""
CANDIDATE_BYTES = 116
"""Bytes that vLLM 0.32 holds for an id that a token might have been, with its log-prob: Python numbers in lists."""
NUM_MORE_CANDIDATES = 17
"""Ids of each token beyond those that may be left: the engine asks for 16 more, for ties, and gets the drawn one."""
MAX_CANDIDATE_BYTES = 8 << 30
"""The most that such ids may take in one actor."""
VLLM_TEMPERATURES = 0.01, 2.0
"""But for 0: vLLM silently raises anything below, and records log-probs of what it did; anything above it refuses."""
TOLERANCES = {RolloutWeights.full: 0.1, RolloutWeights.int8: 0.5}
"""Nats by which log-probs of actors may differ from the learner's; SmolLM2 in int8 differs by 0.2."""


def gpus_per_engine(config: Config) -> int:
    """GPUs that the engine of one actor computes on, where it computes on GPUs."""
    if config.actors.engine != "vllm":
        return config.launch.gpus_per_actor or 1 if ":" in config.actors.engine else 1
    return num_vllm_gpus(config.actors.vllm)


def num_vllm_gpus(given: Mapping[str, Any]) -> int:
    """GPUs of one vLLM: ranks of tensor times pipeline parallelism. ConfigError if one is no positive integer."""
    sizes = {name: given.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"actors.vllm.{name}={size!r}: give a positive integer")
    return math.prod(sizes.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of a setting that was chosen for this machine, and the reason."""

    key: str
    value: Any
    why: str

    @property
    def word(self) -> str:
        """The word for a command line."""
        is_list = isinstance(self.value, list)
        return f"{self.key}=[{','.join(self.value)}]" if is_list else f"{self.key}={str(self.value).lower()}"


def apply(config: Config, choices: Iterable[Choice]) -> None:
    """Set what was chosen."""
    for one in choices:
        section, _, name = one.key.rpartition(".")
        setattr(attrgetter(section)(config), name, one.value)


def choice_lines(choices: Iterable[Choice]) -> list[str]:
    """A line for each reason, with all that was chosen for it, the last of several for one setting."""
    words: dict[str, list[str]] = {}
    for one in {one.key: one for one in choices}.values():
        words.setdefault(one.why, []).append(one.word)
    lines = [f"  {' '.join(chosen)}: {why}" for why, chosen in words.items()]
    return ["chosen for this machine; a setting that you name is kept:", *lines] if lines else []


def settle(config: Config) -> list[Choice]:
    """Replace `auto`, and nulls that stand for it, by what they are here; returns the choices that a GPU gave."""
    if config.publish.probe_tolerance is None:
        config.publish.probe_tolerance = TOLERANCES[config.actors.weights]
    engine, publish, actors = config.actors.engine, config.publish.transports, config.actors.transports
    if engine != "auto" and AUTO not in (publish, actors):
        return []
    gpus, found = usable_gpus(os.environ), []
    if engine == "auto":
        config.actors.engine, why = choose_engine(config, gpus)
        found.append(Choice("actors.engine", config.actors.engine, why))
    names, why = choose_transports(config, gpus)
    for section, own, other in ((config.publish, publish, actors), (config.actors, actors, publish)):
        if own == AUTO:  # where the other side is given, a device transport that it lacks would only take memory
            section.transports = [one for one in names if one in ON_HOST or other == AUTO or one in other]
            key = "publish" if section is config.publish else "actors"
            found.append(Choice(f"{key}.transports", section.transports, why))
    return [one for one in found if one.why]


def choose_engine(config: Config, gpus: Collection[str]) -> tuple[str, str]:
    """The engine that `actors.engine=auto` is here, and why; no reason is given where no GPU leaves a choice."""
    if config.actors.device == "cpu" or not gpus:
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


def choose_transports(config: Config, gpus: Sequence[str]) -> tuple[list[str], str]:
    """The transports that `auto` is for the processes of this launch, best first, and why; as `choose_engine`."""
    host, engine = [*ON_HOST], config.actors.engine
    if config.launch.by_turns:
        return host, "versions stay in host memory while learner and engine take turns with the GPU"
    where = likely_placement(config, gpus)
    actors = {own[0] for own in where.actors}
    if not where.learner or not actors:
        return host, ""
    if engine == "vllm":
        return host, "vLLM maps versions in shared memory, and would first copy to the host what comes on a GPU"
    if engine != "native":
        return host, "an engine of your own is not known to read weights on a GPU"
    shared = where.learner[0] in actors
    found, why = ["ipc"] * shared, [f"learner and actors share GPU {where.learner[0]}"] * shared
    if actors - {where.learner[0]}:
        has_cupy = importlib.util.find_spec("cupy") is not None
        found += ["nccl"] * has_cupy
        why.append("learner and actors have GPUs of their own" + ", and nccl needs cupy (docs/gpu.md)" * (not has_cupy))
    return [*found, *host], "; ".join(why)


def planned(config: Config) -> Sequence[str]:
    """The settings that are chosen for the learner's GPU where nothing gives them; none without one."""
    if config.policy.model_path is None or config.policy.tiny.enabled or config.run.device == "cpu":
        return ()
    with_engine = PLANNED if config.actors.engine == "vllm" else PLANNED[:-1]  # the native one has no paged cache
    return with_engine if usable_gpus(os.environ) else ()


def check_engine(config: Config) -> None:
    """Raise ConfigError for the first setting that the actors' engine cannot serve."""
    if config.actors.weights != "full" and config.actors.engine != "native":
        raise ConfigError(
            f"actors.weights={config.actors.weights} is rounded by the native engine alone, and actors.engine is "
            f"{config.actors.engine}: vLLM has actors.vllm.quantization, or leave actors.weights=full"
        )
    if config.actors.engine == "vllm":
        _check_temperatures(config.rollout)
    if most_answer_tokens(config) is not None:
        _check_candidates(config.rollout.train.sampling, config.actors.num_concurrent)


def _check_temperatures(rollout: RolloutConfig) -> None:
    """Raise ConfigError for the first temperature that vLLM would refuse in every request."""
    train, (lowest, highest) = rollout.train, VLLM_TEMPERATURES
    for key, values in {
        "train.sampling.temperature": [train.sampling.temperature],
        "train.final_temperature": [train.final_temperature], "train.member_temperatures": train.member_temperatures,
        "test.sampling.temperature": [rollout.test.sampling.temperature],
    }.items():
        for value in values:
            if value and not lowest <= value <= highest:
                raise ConfigError(
                    f"rollout.{key}={value}: vLLM goes from {lowest} to {highest}, or 0 for greedy: change it, or take "
                    "actors.engine=native"
                )


def most_answer_tokens(config: Config) -> int | None:
    """Tokens that all answers of one actor may have together, where vLLM names ids for each; None where it does not."""
    sampling = config.rollout.train.sampling
    if config.actors.engine != "vllm" or not (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0):
        return None
    kept = sampling.top_k if sampling.top_k > 0 else sampling.max_kept
    return MAX_CANDIDATE_BYTES // (CANDIDATE_BYTES * (kept + NUM_MORE_CANDIDATES))


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
        if launch.gpus_per_actor is not None or launch.share_gpus is True:
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
        share=not named if launch.share_gpus is None else bool(launch.share_gpus), by_turns=launch.by_turns,
        learner_share=config.learner.gpu_memory_share, actor_share=config.actors.gpu_memory_share,
    )


def likely_placement(config: Config, gpus: Sequence[str]) -> Placement:
    """The same, and none where a launch would refuse the settings: a learner on its own may use them."""
    try:
        return placement_of(config, gpus)
    except ConfigError:
        return Placement()
