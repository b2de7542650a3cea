"""Settings under which a run fits: every weight before adapters, and the fewest means that save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from learner.fit.estimate import (
    RESERVED,
    EngineMemory,
    RankMemory,
    engine_memory,
    job_of,
    num_parameters,
    rank_memory,
    tensor_parallel_sizes,
)
from streamrl.architectures.decode_graphs import graph_bytes
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.load import load_config

FEWEST_SEQUENCES = 8
"""An engine that holds fewer of the whole length at once waits for itself."""
METHODS: Mapping[str, tuple[str, ...]] = {
    "every weight": (),
    "every weight, moments in 8 bits": ("policy.optimizer.name=adam8bit",),
    "every weight, moments in host memory": ("policy.optimizer.offload=true",),
    "an adapter": ("policy.lora.rank=32",),
    "an adapter on a base in 4 bits": ("policy.lora.rank=32", "policy.lora.base_quantization=nf4"),
}
LARGE_BATCH, MOST_SEQUENCES = 16384, 256


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one size, and the longest sequence of the run."""

    gpus: int
    memory: float
    context: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings, and what follows from them."""

    method: str
    words: tuple[str, ...]
    ranks: int
    actors: int
    rank: RankMemory
    engine: EngineMemory
    version: int  # bytes that move with each version
    weights: int  # bytes of the model in half precision
    fits: bool


class Planner:
    """Looks for settings, with every estimate made once.

    Args:
        given: settings of the user, which are kept.
        notify: called with a line about each estimate.
    """

    def __init__(
        self, name: str, model_config: Any, given: Sequence[str], notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.parameters = num_parameters(model_config)
        self._has_experts = "expert" in str(sorted(model_config.get_text_config().to_dict()))
        self._name, self._model, self._given, self._notify = name, model_config, tuple(given), notify
        self._native = "actors.engine=native" in given
        self._estimates: dict[tuple[str, ...], RankMemory] = {}

    def propose(self, machine: Machine) -> Proposal:
        """The first settings that fit, or the smallest that were found, which do not."""
        smallest: Proposal | None = None
        for found in self._candidates(machine):
            if found.fits:
                return found
            if smallest is None or found.rank.total < smallest.rank.total:
                smallest = found
        assert smallest is not None, "there is always a first candidate"
        return smallest

    def _candidates(self, machine: Machine) -> Iterator[Proposal]:
        """From the best to what saves most memory."""
        large = max(LARGE_BATCH, machine.context)
        passes = dict.fromkeys(((False, large), (True, large), (True, machine.context)))
        for method, words in METHODS.items():
            if self._has_experts and "policy.lora.rank=32" in words:  # experts keep weights in a form of their own
                words = (*words, "policy.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]")
            if self._contradicts(words):
                continue
            for ranks, engines in self._splits(machine):
                for recompute, tokens in passes:
                    yield self._proposal(machine, method, words, ranks, engines, recompute, tokens)

    def _splits(self, machine: Machine) -> list[tuple[int, EngineMemory]]:
        """Numbers of learner ranks, each with the smallest engine that the model fits; half of the GPUs first."""
        fixed = [int(word.partition("=")[2]) for word in self._given if word.startswith("launch.num_learner_ranks=")]
        if machine.gpus == 1:
            return [(1, self._engine(1, machine, machine.memory / 2))]
        sizes = tensor_parallel_sizes(self._model, 1 if self._native else machine.gpus - 1)
        usable = [size for size in sizes if self._holds_enough(size, machine)] or sizes[-1:]
        size = usable[0]
        ranks = fixed or list(dict.fromkeys((machine.gpus // 2, machine.gpus - 2 * size, machine.gpus - size)))
        fitting = [n for n in ranks if 1 <= n <= machine.gpus - size and n >= (fixed or [machine.gpus // 2])[0]]
        sizes = [word.partition("=")[2] for word in self._given if word.startswith("learner.mesh.")]
        axes = prod(int(text) for text in sizes if text.isdecimal())
        fitting = [n for n in fitting if n % axes == 0]
        return [(n, self._engine(size, machine)) for n in fitting or [(machine.gpus - size) // axes * axes]]

    def _holds_enough(self, size: int, machine: Machine) -> bool:
        return self._engine(size, machine).sequences(machine.context) >= FEWEST_SEQUENCES

    def _engine(self, size: int, machine: Machine, memory: float | None = None) -> EngineMemory:
        rows = [int(word.partition("=")[2]) for word in self._given if word.startswith("actors.num_concurrent=")]
        graphs = graph_bytes(self._model, (rows or [MOST_SEQUENCES])[-1], machine.context) if self._native else 0
        usable = machine.memory if memory is None else memory
        return engine_memory(self._model, 2 * self.parameters, usable, size, graphs=graphs)

    def _contradicts(self, words: Sequence[str]) -> bool:
        """Whether a setting of the user says otherwise."""
        own = dict(word.split("=", 1) for word in self._given)
        if "policy.lora.rank" in own and "policy.lora.rank=32" not in words:
            return True
        wanted = dict(word.split("=", 1) for word in words if not word.startswith("policy.lora.rank"))
        return any(own.get(key, value) != value for key, value in wanted.items())

    def _proposal(
        self, machine: Machine, method: str, words: Sequence[str], ranks: int, engine: EngineMemory, recompute: bool,
        tokens: int,
    ) -> Proposal:
        actors = max(1, (machine.gpus - ranks) // engine.tensor_parallel)
        chosen = [
            f"policy.model_path={self._name}", f"launch.num_learner_ranks={ranks}", f"launch.num_actors={actors}",
            "actors.engine=vllm", *words, f"learner.max_tokens_per_device={tokens}",
            f"rollout.max_prompt_tokens={machine.context // 4}",
            f"rollout.train.sampling.max_new_tokens={machine.context - machine.context // 4}",
        ]
        chosen += [f"actors.vllm.tensor_parallel_size={engine.tensor_parallel}"] * (engine.tensor_parallel > 1)
        chosen += ["policy.gradient_checkpointing=true"] * recompute
        own = {word.partition("=")[0] for word in self._given}
        chosen = [*(word for word in chosen if word.partition("=")[0] not in own), *self._given]
        rank = self._estimate(chosen)
        if machine.gpus == 1:  # shared: the engine gets what the learner leaves, on top of one context
            engine = self._engine(1, machine, (machine.memory - rank.total) / 0.92)
            share = min(0.95, (rank.total + RESERVED / 2) / machine.memory)
            chosen += [f"learner.gpu_memory_share={share:.2f}"] * ("learner.gpu_memory_share" not in own)
        sequences = engine.sequences(machine.context)
        if "actors.num_concurrent" not in own and sequences:
            chosen.append(f"actors.num_concurrent={min(MOST_SEQUENCES, sequences)}")
        fits = rank.total <= machine.memory and sequences >= 1
        version = 2 * (rank.trained if "policy.lora.rank" in str(chosen) else self.parameters)
        return Proposal(
            method, tuple(chosen), ranks, actors, rank, engine, version, 2 * self.parameters, fits
        )

    def _estimate(self, words: Sequence[str]) -> RankMemory:
        parts = ("policy.", "learner.", "launch.num_learner", "rollout.", "loss.", "kl.", "critic.", "publish.")
        key = tuple(word for word in words if word.startswith(parts))
        if key not in self._estimates:
            config = load_config([word for word in words if not word.startswith("actors.vllm")])
            self._notify(f"counting a step of {config.launch.num_learner_ranks} learner ranks")
            job = job_of(config, longest=longest_sequence(config), on_gpu=True)
            self._estimates[key] = rank_memory(job, self._model)
        return self._estimates[key]
