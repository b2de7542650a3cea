"""The share of a learner's step that is the algorithm: part of `bench.algorithms`.

One packed batch, as the learner trains it. The step is cut at the log-probs: above the cut the objective (begin,
observe where the estimator needs it, loss, statistics, and the backward pass from the loss to the log-probs and
entropies), below it the model's passes and the optimizer. The log-probs that the objective sees are the recorded ones
plus noise, as of a policy a few steps later; what the model is given back is the gradient in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import record
from learner.data.packing import MicroBatch, pack
from learner.data.trajectories import Trajectory
from learner.model.gradients import optimizer_step
from learner.model.optimizer import make_optimizer, make_schedule
from learner.model.policy import Policy, load_policy
from learner.objective.loss import micro_batch_loss
from learner.objective.objective import Objective
from learner.objective.plan import BatchPlan
from learner.objective.scoring_pass import with_outputs
from learner.objective.statistics import StepStatistics
from learner.objective.token_batch import PassOutputs
from learner.ranks.mesh import Ranks
from learner.setup.shadows import make_shadows
from streamrl.config.schema import (
    AdvantageConfig,
    ConstraintConfig,
    KlConfig,
    LossConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from streamrl.messages import PlanRow

LENGTH, PROMPT, GROUP, VERSION = 128, 16, 8, 5
GOAL = {"id": "algorithm-share", "op": "<=", "value": 3.0}
SHADOW_GOAL = {"id": "shadow-share", "op": "<=", "value": 5.0}
SHADOWS = ("grpo", "vespo", "extreme_lag")
SETTINGS = {
    "group+ppo_clip": (AdvantageConfig(), LossConfig(opsm_delta=0.5)),
    "vtrace_critic_free+ppo_clip": (AdvantageConfig(estimator="vtrace_critic_free"), LossConfig()),
    "vtrace+ppo_clip": (AdvantageConfig(estimator="vtrace", lam=0.95, whiten="batch"), LossConfig()),
    "group+m2po": (AdvantageConfig(), LossConfig(surrogate="m2po", dual_clip=None, clip_low=0.3, clip_high=0.5)),
}


def share_of_step(model_dir: Path, *, num_tokens: int, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Percent of the step's CPU time, one line for each pair of estimator and surrogate."""
    rows = trajectories(num_tokens // LENGTH, seed)
    batch = pack(rows, num_tokens)[0]
    policy = load_policy(model_dir, ranks=Ranks(), chunk_tokens=1024)
    optimizer = make_optimizer(policy, OptimizerConfig())
    model_s, above_s, shadow_s = [], {name: [] for name in SETTINGS}, []
    for _ in range(num_steps):
        model_s.append(model_seconds(policy, optimizer, batch))
        for _ in range(5):  # a hundredth of the step: often enough for a median
            for name in SETTINGS:
                above_s[name].append(objective_seconds(name, rows, batch, seed)[0])
            # Beside a step of its own each time, since the machine's pace drifts.
            plain, beside = (objective_seconds("group+ppo_clip", rows, batch, seed, one)[0] for one in ((), SHADOWS))
            shadow_s.append((beside - plain) / len(SHADOWS))
    lines, whole = [], statistics.median(model_s)
    for name, times in above_s.items():
        own = statistics.median(times)
        params = {
            "model": model_dir.name, "tokens": batch.num_tokens, "scored_tokens": batch.num_scored,
            "trajectories": len(rows), "threads": 1, "clock": "CPU time of the process",
            "objective_ms": 1e3 * own, "model_and_optimizer_ms": 1e3 * whole, "steps": num_steps,
        }
        lines.append(record(
            f"algorithms.share_of_step.{name}", 100 * own / (own + whole), "%", "lower",
            [100 * one / (one + whole) for one in times], params, goal=GOAL, seed=seed,
        ))
    each = statistics.median(shadow_s)
    lines.append(record(
        "algorithms.share_of_step.shadow", 100 * each / whole, "%", "lower", [100 * one / whole for one in shadow_s],
        {**params, "objective_ms": 1e3 * each, "shadows": list(SHADOWS)}, goal=SHADOW_GOAL, seed=seed,
    ))
    return lines


def model_seconds(policy: Policy, optimizer: torch.optim.Optimizer, batch: MicroBatch) -> float:
    """Forward and backward passes and the optimizer's step."""
    schedule = make_schedule(OptimizerConfig(), SchedulerConfig(), num_steps=100)
    began = time.process_time()
    logprobs, entropy = policy(
        batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
    )
    logprobs.backward(torch.full_like(logprobs, 1.0 / len(logprobs)))
    optimizer_step(policy, optimizer, schedule, step=0, max_grad_norm=1.0, ranks=Ranks())
    return time.process_time() - began


def objective_seconds(
    name: str, rows: list[Trajectory], batch: MicroBatch, seed: int, shadows: Sequence[str] = ()
) -> tuple[float, float]:
    """CPU seconds of everything above the log-probs in one step, and the loss."""
    advantage, loss = SETTINGS[name]
    objective = Objective(advantage, loss, max_new_tokens=LENGTH - PROMPT, max_lag=8)
    generator = torch.Generator().manual_seed(seed)
    recorded = batch.behavior_logprobs[batch.mask]
    logprobs = (recorded + 0.05 * torch.randn(len(recorded), generator=generator)).requires_grad_()
    entropy = torch.rand(len(recorded), generator=generator).requires_grad_()
    values = torch.rand(batch.mask.shape, generator=generator) * batch.mask
    plan = [PlanRow(r.group_id, r.index, 0, r.num_tokens, r.num_action_tokens, r.reward, 1) for r in rows]
    made = make_shadows(shadows, objective, KlConfig(), ConstraintConfig(), max_lag=8, num_minibatches=1)
    began = time.process_time()
    ranks = Ranks()
    planned = BatchPlan.from_batch(objective, rows, plan, version=VERSION, ranks=ranks)
    statistics = StepStatistics(planned, ranks, made)
    if objective.needs:
        outputs = PassOutputs(policy=batch.padded(logprobs.detach()), values=values, bootstrap=torch.zeros(len(rows)))
        planned = with_outputs(planned, [(batch, outputs)], ranks)
    total = micro_batch_loss(batch, logprobs, entropy, planned, note=statistics.note)
    total.backward()
    statistics.finish()
    seconds = time.process_time() - began
    assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())
    return seconds, float(total.detach())


def trajectories(count: int, seed: int) -> list[Trajectory]:
    """Finished trajectories of one turn, all of the same length, of lags 0 to 3."""
    rng = np.random.default_rng(seed)
    answer = LENGTH - PROMPT + 1  # the last token is predicted but not read
    made = []
    for place in range(count):
        reward = float(rng.random() < 0.5)
        rewards = np.zeros(answer, dtype=np.float32)
        rewards[-1] = reward
        versions = np.sort(rng.integers(VERSION - 3, VERSION + 1, answer))
        made.append(Trajectory(
            group_id=place // GROUP, index=place % GROUP, prompt_ids=rng.integers(0, 1000, PROMPT - 1, dtype=np.int32),
            token_ids=rng.integers(0, 1000, answer, dtype=np.int32),
            logprobs=-rng.exponential(0.7, answer).astype(np.float32), mask=np.ones(answer, dtype=bool),
            versions=versions.astype(np.int64), rewards=rewards, turns=np.zeros(answer, dtype=np.int64), reward=reward,
            num_turns=1, scores={"score": reward}, temperature=1.0, truncated=False,
        ))
    return made
