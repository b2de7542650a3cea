"""Steps of the way that one rank and two take alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learner.data.layout import make_layout
from learner.data.trajectories import Trajectory
from learner.model.adapter.lora import UP_FACTOR, add_adapter
from learner.model.networks import Networks
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import Policy
from learner.objective.objective import Objective
from learner.ranks.mesh import Ranks, local_part
from learner.trainer import Trainer, TrainerSettings
from streamrl.config.schema import AdvantageConfig, LoraConfig, LossConfig, OptimizerConfig
from streamrl.messages import PlanRow, VersionRef

V1, V2 = VersionRef(1, 1), VersionRef(1, 2)
BUCKET_BYTES = 4096
LORA = LoraConfig(rank=2, alpha=8.0)
NEW_TOKENS = 10
_OPTIMIZER = OptimizerConfig(lr=5e-3, eps=1e-2)
"""So large an eps that sums in another order, where a gradient is 0, do not become steps of the learning rate."""


def packed_logprobs(policy: Policy, rows: Sequence[Tensor]) -> Tensor:
    """Log-prob of every token but each row's first, all rows in one pass; collective over a policy's ranks."""
    starts, lengths = np.cumsum([0, *(len(row) for row in rows)]), [len(row) for row in rows]
    index = torch.cat([torch.arange(start, start + n - 1) for start, n in zip(starts[:-1], lengths, strict=True)])
    targets = torch.cat([row[1:] for row in rows])
    logprobs, _ = policy(
        torch.cat(list(rows)), torch.cat([torch.arange(n) for n in lengths]), make_layout(lengths), index, targets,
        torch.ones(len(targets)),
    )
    return logprobs


def adapt(policy: Policy, *, seed: int) -> None:
    """An adapter whose second factors are not 0, as after a few steps."""
    add_adapter(policy, LORA, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, factor in policy.named_parameters():
            if UP_FACTOR in name:
                local_part(factor).normal_(0.0, 0.05, generator=generator)


def trajectory(
    group: int, index: int, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float]
) -> Trajectory:
    """One answer of a group, as the hub hands it to a learner; of two in a group the second is right."""
    count, reward = len(answer), float(index)
    rewards = np.zeros(count, np.float32)
    rewards[-1] = reward
    return Trajectory(
        group_id=group, index=index, prompt_ids=np.array(prompt, np.int32), token_ids=np.array(answer, np.int32),
        logprobs=np.array(logprobs, np.float32), mask=np.ones(count, bool), versions=np.full(count, V1.version),
        rewards=rewards, turns=np.zeros(count, np.int64), reward=reward, num_turns=1, scores={"score": reward},
        temperature=1.0, truncated=False,
    )


def train(policy: Policy, batch: Sequence[Trajectory], ranks: Ranks) -> None:
    """One optimizer step on the batch, from version 1 to 2. ValueError if the weights did not move."""
    plan = tuple(
        PlanRow(
            group_id=row.group_id, index=row.index, rank=row.group_id % ranks.mesh.dp_size, num_tokens=row.num_tokens,
            num_action_tokens=row.num_action_tokens, reward=row.reward, head_lag=0,
        )
        for row in batch
    )
    mine = [row for row in batch if row.group_id % ranks.mesh.dp_size == ranks.dp_rank]
    objective = Objective(AdvantageConfig(scale="std"), LossConfig(), max_new_tokens=NEW_TOKENS, max_lag=4)
    networks = Networks(policy, make_optimizer(policy, _OPTIMIZER))
    settings = TrainerSettings(max_tokens=256)
    trainer = Trainer(networks, Schedule("constant", _OPTIMIZER.lr, 5), objective, settings, ranks, version=V1.version)
    trained = trainer.train_batch(mine, plan)
    if trained.result.skipped or not trained.result.grad_norm > 0 or trainer.version != V2.version:
        raise ValueError(f"the step was not taken, its gradient has norm {trained.result.grad_norm}")
