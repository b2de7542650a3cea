"""Learner's kit: tiny models, made-up trajectories, and one batch through the objective. Everything is seeded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from learner.data.packing import MicroBatch
from learner.data.trajectories import Trajectory
from learner.model.policy import Policy
from learner.objective.loss import micro_batch_loss
from learner.objective.objective import Objective
from learner.objective.plan import BatchPlan
from learner.objective.regularizers import LossWeights, Regularizers
from learner.objective.scoring_pass import score_batch, with_outputs
from learner.objective.statistics import StepStatistics
from learner.objective.token_batch import LagPolicy, PassOutputs
from learner.ranks.mesh import Ranks
from learner.trainer import forward_backward
from streamrl.config.schema import AdvantageConfig, Config, LossConfig
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter

VOCAB = 53
transformers_logging.disable_progress_bar()


def tiny_checkpoint(directory: Path, architecture: str = "qwen3", *, tied: bool = True, seed: int = 0) -> Path:
    """A two-layer random model, two key/value heads for four query heads (not gpt2); mistral sees six tokens back."""
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.3, dtype="float32",
    )
    if architecture == "mistral":
        sizes["sliding_window"] = 6
    kinds = {"qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig, "gpt2": GPT2Config}
    config = kinds[architecture](**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def trajectory(
    rng: np.random.Generator, group_id: int, index: int, *, num_prompt: int | None = None,
    num_actions: int | None = None, version: int = 5, max_lag: int = 3, with_gap: bool = True, temperature: float = 1.0,
) -> Trajectory:
    """Random tokens; sometimes with an observation between two turns, and with two sampling versions."""
    num_prompt = num_prompt or int(rng.integers(2, 9))
    num_actions = num_actions or int(rng.integers(1, 12))
    gap = 2 if with_gap and num_actions > 3 and rng.random() < 0.5 else 0
    cut = num_actions // 2
    mask = np.array([True] * cut + [False] * gap + [True] * (num_actions - cut))
    oldest = version - int(rng.integers(0, max_lag + 1))
    versions = np.where(np.arange(len(mask)) < cut, oldest, min(version, oldest + 1))
    rewards = np.zeros(len(mask), dtype=np.float32)
    rewards[-1] = reward = float(rng.integers(0, 4))
    return Trajectory(
        group_id=group_id, index=index,
        prompt_ids=rng.integers(0, VOCAB, num_prompt).astype(np.int32),
        token_ids=rng.integers(0, VOCAB, len(mask)).astype(np.int32),
        logprobs=np.where(mask, rng.normal(-3.9, 0.4, len(mask)), 0.0).astype(np.float32),
        mask=mask, versions=np.where(mask, versions, -1), rewards=rewards,
        turns=np.where(mask & (np.arange(len(mask)) >= cut) & (gap > 0), 1, 0), reward=reward, num_turns=1 + (gap > 0),
        scores={"score": reward / 3}, temperature=temperature, truncated=bool(rng.random() < 0.2),
    )


def batch(num_groups: int = 3, group_size: int = 4, *, seed: int = 0, **options) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [trajectory(rng, g, i, **options) for g in range(num_groups) for i in range(group_size)]


def plan_of(rows: list[Trajectory], *, world: int = 1, version: int = 5) -> tuple[PlanRow, ...]:
    """The plan that the hub would send: whole groups dealt to ranks in turn."""
    return tuple(
        PlanRow(
            group_id=row.group_id, index=row.index, rank=row.group_id % world, num_tokens=row.num_tokens,
            num_action_tokens=row.num_action_tokens, reward=row.reward,
            head_lag=version - int(row.versions[row.mask].min()) if row.mask.any() else 0,
        )
        for row in rows
    )


def make_objective(
    advantage: AdvantageConfig | None = None, loss: LossConfig | None = None, *, config: Config | None = None,
    controls: LossWeights | None = None, **options: Any,
) -> Objective:
    """An objective of these settings, or of a whole configuration with all that pulls on its policy."""
    if config is not None:
        advantage, loss = advantage or config.advantage, config.loss
        controls = controls or LossWeights(config.kl, config.entropy, config.constraint, loss)
        regularizers = Regularizers(config.kl, config.constraint, loss, controls, config.distill)
        options = {"regularizers": regularizers, **options}
    return Objective(
        advantage or AdvantageConfig(), loss or LossConfig(), **{"max_new_tokens": 16, "max_lag": 4, **options}
    )


class OneBatch:
    """Plan, scoring pass, losses and statistics of the first optimizer step of a batch."""

    def __init__(
        self, objective: Objective, rows: Sequence[Trajectory], plan: Sequence[PlanRow], *, version: int = 5,
        ranks: Ranks | None = None, lag_policy: LagPolicy | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.plan = BatchPlan.from_batch(
            objective, rows, plan, version=version, ranks=self.ranks, lag_policy=lag_policy
        )
        self.statistics = StepStatistics(self.plan, self.ranks)
        self._observed: list[tuple[MicroBatch, PassOutputs]] = []

    def score(self, policy: Policy, micro_batches: Sequence[MicroBatch], **networks) -> None:
        self.plan = score_batch(policy, micro_batches, self.plan, self.ranks, **networks)
        self.statistics.scored(self.plan)

    def observe(self, micro: MicroBatch, outputs: PassOutputs) -> None:
        """Outputs of networks as a test makes them up."""
        self._observed.append((micro, outputs))

    def close_observation(self) -> None:
        self.plan = with_outputs(self.plan, self._observed, self.ranks)
        self.statistics.scored(self.plan)

    def loss(self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return micro_batch_loss(micro, logprobs, entropy, self.plan, note=self.statistics.note)

    def forward_backward(self, policy: Policy, micro: MicroBatch) -> Tensor:
        return forward_backward(policy, micro, self.plan, self.statistics, self.ranks)

    def finish(self) -> Meter:
        return self.statistics.finish()
