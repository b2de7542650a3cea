"""Methods of `streamrl sft`, `dpo` and `train-reward-model`: rows of a record, their loss, and measurements."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from envs.data.shapes import tool_schemas
from learner.data.packing import MicroBatch
from learner.data.trajectories import Trajectory
from learner.model.policy import Policy
from learner.model.reference import FrozenPolicy
from learner.supervised.records import AnswerShape, row_of, shape_of
from learner.supervised.rendering import Encoded, Encoder
from learner.supervised.reward_network import RewardNetwork
from streamrl.config.schema import DataConfig, DpoConfig
from streamrl.environment import Record

Measured = dict[str, Tensor]
"""Sums over the units of a micro-batch, by the last part of the metric."""


class Method(Protocol):
    """Interface of a method that learns from records.

    Attributes:
        network: what learns.
        shape: reads and checks records.
    """

    network: nn.Module
    shape: AnswerShape

    def row(self, place: int, record: Record) -> Trajectory | None:
        """A record to be packed; None if nothing of it can be trained on."""
        ...

    def units(self, row: Trajectory) -> int:
        """Number of tokens, or of pairs, over which the loss is a mean."""
        ...

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Measured]:
        """The sum over the units of a micro-batch, 0-d with gradients, and what is measured beside it."""
        ...


def logprobs_of(policy: Policy, batch: MicroBatch) -> Tensor:
    """Log-prob of each scored token, [M]."""
    return policy(
        batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
    )[0]


def sums_of_sides(batch: MicroBatch, values: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token values [M] added up over the better and the worse answer of each pair, [S] each."""
    padded, worse = batch.padded(values), batch.turns == 1
    return padded.masked_fill(worse, 0.0).sum(1), padded.masked_fill(~worse, 0.0).sum(1)


class Sft:
    """Cross entropy of the assistant's tokens.

    Args:
        max_tokens: a longer conversation is cut after so many.
    """

    def __init__(self, policy: Policy, encoder: Encoder, data: DataConfig, *, max_tokens: int) -> None:
        self.network, self._encoder, self._max_tokens = policy, encoder, max_tokens
        self.shape = shape_of(data, pairs=False)

    def row(self, place: int, record: Record) -> Trajectory | None:
        ids, mask = self._encoder.encode(self.shape.messages(record), tool_schemas(record))
        return row_of(place, [(ids[: self._max_tokens], mask[: self._max_tokens])])

    def units(self, row: Trajectory) -> int:
        return row.num_action_tokens

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Measured]:
        return -logprobs_of(self.network, batch).sum(), {}


class _OfPairs:
    """What methods that read pairs have in common."""

    def __init__(self, encoder: Encoder, data: DataConfig, max_tokens: int) -> None:
        self._encoder, self._max_tokens = encoder, max_tokens // 2  # of each side: both are packed as one row
        self.shape = shape_of(data, pairs=True)

    def row(self, place: int, record: Record) -> Trajectory | None:
        tools = tool_schemas(record)
        sides = [self.side(*self._encoder.encode(messages, tools)) for messages in self.shape.pair(record)]
        return row_of(place, sides, margin=self.shape.margin(record))

    def side(self, ids: np.ndarray, mask: np.ndarray) -> Encoded:
        """One conversation of a pair as it is packed."""
        return ids[: self._max_tokens], mask[: self._max_tokens]

    def units(self, row: Trajectory) -> int:
        return 1

    @staticmethod
    def measured(chosen: Tensor, rejected: Tensor) -> Measured:
        """Rewards of both sides, [S] each, as metrics."""
        with torch.no_grad():
            return {
                "chosen_reward": chosen.sum(), "rejected_reward": rejected.sum(),
                "margin": (chosen - rejected).sum(), "accuracy": (chosen > rejected).float().sum(),
            }


class Dpo(_OfPairs):
    """Direct preference optimization (Rafailov et al. 2023), with label smoothing and an SFT term."""

    def __init__(
        self, policy: Policy, reference: FrozenPolicy, encoder: Encoder, data: DataConfig, settings: DpoConfig, *,
        max_tokens: int,
    ) -> None:
        super().__init__(encoder, data, max_tokens)
        self.network, self._reference, self._settings = policy, reference, settings

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Measured]:
        settings = self._settings
        before = self._reference.score(batch)
        logprobs = logprobs_of(self.network, batch)
        chosen, rejected = sums_of_sides(batch, settings.beta * (logprobs - before))
        smoothing, difference = settings.label_smoothing, chosen - rejected
        loss = -(1.0 - smoothing) * F.logsigmoid(difference) - smoothing * F.logsigmoid(-difference)
        if settings.sft_weight:
            nats, _ = sums_of_sides(batch, -logprobs)
            counts, _ = sums_of_sides(batch, torch.ones_like(logprobs))
            loss = loss + settings.sft_weight * nats / counts.clamp(min=1.0)
        return loss.sum(), self.measured(chosen.detach(), rejected.detach())


class RewardModel(_OfPairs):
    """Bradley-Terry: the better answer's score is to be greater, by the record's margin.

    A score is read at the last token, where `AutoModelForSequenceClassification` reads it: the one before trailing
    tokens of padding. A token of no meaning after it makes the packing give its place.
    """

    def __init__(self, network: RewardNetwork, encoder: Encoder, data: DataConfig, *, max_tokens: int) -> None:
        super().__init__(encoder, data, max_tokens - 2)
        self.network = network
        self.padding = padding_of(encoder.tokenizer)

    def side(self, ids: np.ndarray, mask: np.ndarray) -> Encoded:
        told = np.flatnonzero(ids != self.padding)
        ids = ids[: told[-1] + 1][-self._max_tokens :] if len(told) else ids[:0]  # the answer stands at the end
        return np.append(ids, self.padding).astype(np.int32), np.arange(len(ids) + 1) == max(1, len(ids))

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Measured]:
        scores = self.network(batch.tokens, batch.positions, batch.packing, batch.score_index)
        chosen, rejected = sums_of_sides(batch, scores)
        loss = -F.logsigmoid(chosen - rejected - batch.rewards.sum(1))
        return loss.sum(), self.measured(chosen.detach(), rejected.detach())


def padding_of(tokenizer: Any) -> int:
    """The token that batches of a sequence classifier are padded with."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((one for one in known if one is not None), 0)
