"""A run in which one part after the other is slow: engine, task and optimizer that sleep, by the version.

The engine is scripted and makes no real tokens; what is real is everything that measures them.
"""

import asyncio
import time
from typing import Any

import torch
from torch import nn

from actors.engines.base import EngineSpec, GenerateRequest, Generation, InstallTimes
from envs.tasks.strings import StringTask
from streamrl.environment import Record, Step
from streamrl.messages import VersionRef
from tests.fakes.scripted_engine import ScriptedEngine

PHASES = ("generation", "environment", "install", "learner")
STEPS_PER_PHASE = 8
GENERATE_S = {"generation": 0.15, "install": 0.05}
"""Of one sequence; with 8 at once and 32 in a batch, four times that for a batch."""
REWARD_S = {"environment": 0.075}
"""Of one call; with 4 threads eight times that for a batch."""
PAUSE_S = {"install": 0.4}
LEARNER_S = 0.5


def phase_of(version: int) -> str:
    return PHASES[min(version // STEPS_PER_PHASE, len(PHASES) - 1)]


class PhasedTask(StringTask):
    """The phase is that of the version that the engine in this process holds; in the learner nothing sleeps."""

    phase = ""

    def reward(self, record: Record, completion: str) -> Step:
        time.sleep(REWARD_S.get(PhasedTask.phase, 0.0))
        step = super().reward(record, completion)
        return Step(reward=step.reward, score=step.score, parts={"brevity": -float(len(completion))})


class PhasedEngine(ScriptedEngine):
    """Slow to generate, or paused by an install."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self._open = asyncio.Event()

    async def _run(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(GENERATE_S.get(PhasedTask.phase, 0.0))
        await self._open.wait()
        return await super()._run(request)

    async def install(self, tensors: Any, ref: VersionRef) -> InstallTimes:
        PhasedTask.phase = phase_of(ref.version)
        pause_s = PAUSE_S.get(PhasedTask.phase, 0.0)
        self._open.clear()
        await asyncio.sleep(pause_s)
        await super().install(tensors, ref)
        self._open.set()
        return InstallTimes(pause_s=pause_s, install_s=pause_s)


def engine(spec: EngineSpec) -> PhasedEngine:
    return PhasedEngine(max_num_seqs=spec.max_num_seqs, num_tokens=4, vocab_size=len(spec.tokenizer))


class PhasedSGD(torch.optim.SGD):
    """Slow in the last phase."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self._num_steps = 0

    def step(self, closure: Any = None) -> None:
        time.sleep(LEARNER_S if phase_of(self._num_steps) == "learner" else 0.0)
        self._num_steps += 1
        super().step(closure)


def optimizer(module: nn.Module, *, lr: float) -> PhasedSGD:
    return PhasedSGD([one for one in module.parameters() if one.requires_grad], lr=lr)
