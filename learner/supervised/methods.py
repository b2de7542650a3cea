"""Methods of `streamrl sft`, `dpo` and `train-reward-model`: rows of a record, their loss, and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from envs.data.shapes import tool_schemas
from learner.data.layout import PackedLayout
from learner.data.packing import MicroBatch
from learner.data.trajectories import Trajectory
from learner.model.attention.packed import decoder_of, packed_states, prefix_in, registered
from learner.model.networks import FrozenPolicy
from learner.model.policy import Policy, decoder_layers, load_policy, policy_tensors, shard, travels_as
from learner.publish.export import set_chat_template
from learner.ranks.mesh import Ranks
from learner.supervised.records import AnswerShape, Encoded, Encoder, row_of, shape_of
from streamrl.config.schema import DataConfig, DpoConfig, DpoLoss, LearnerConfig, ReferenceConfig
from streamrl.environment import Record
from streamrl.errors import ConfigError


class RewardNetwork(nn.Module):
    """Maps packed tokens to a score of each state that is asked for."""

    def __init__(self, decoder: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def forward(self, tokens: Tensor, positions: Tensor, packing: PackedLayout, index: Tensor) -> Tensor:
        """Scores of the states at `index` [M] of the packed row [N]; [M] in float32."""
        states = packed_states(self.decoder, tokens, positions, packing).index_select(0, index)
        return self.score(states.to(self.score.weight.dtype))[:, 0].float()


def load_reward_network(
    model_dir: Path, learner: LearnerConfig, ranks: Ranks, *, dtype: torch.dtype, gradient_checkpointing: bool
) -> RewardNetwork:
    """The decoder of a causal language model with a head that gives every text the score 0; a collective call.

    Raises ConfigError: transformers has no sequence classifier of this architecture to export it as.
    """
    made: list[RewardNetwork] = []

    def around(start: Policy) -> RewardNetwork:
        start.model.set_attn_implementation(registered(start.attention))
        made.append(RewardNetwork(decoder_of(start.model), start.hidden_size))
        _as_classifier(made[0], model_dir)
        return made[0]

    # Without a mesh nothing is sharded, and the type of a policy's passes would be refused.
    start = load_policy(
        model_dir, max_tokens=learner.max_row_tokens, attention=learner.attention.name, ranks=ranks, around=around,
        gradient_checkpointing=gradient_checkpointing, dtype=dtype if ranks.fsdp_mesh is not None else torch.float32,
    )
    return made[0] if made else shard(around(start), decoder_layers(start.model), ranks, dtype)


def _as_classifier(network: RewardNetwork, model_dir: Path) -> tuple[Any, dict[str, str]]:
    """The empty sequence classifier that it is exported as, and the name there of each of its tensors.

    Raises ConfigError: there is none of this architecture, or it has other tensors.
    """
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    config = config.get_text_config(decoder=True)  # it reads no images
    config.num_labels = 1
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        prefix = prefix_in(model, network.decoder) or ""
        names = {name: name.replace("decoder.", prefix, 1) for name, _ in policy_tensors(network)}
        if lacking := sorted({name for name, _ in policy_tensors(model)} - {*names.values()}):
            raise ValueError(f"it also has {lacking[0]}")
    except ValueError as error:
        raise ConfigError(
            f"policy.model_path={model_dir} cannot become a reward model: transformers has no sequence classifier of "
            "its architecture that reads it; take a Llama, Qwen, Mistral or Gemma model"
        ) from error
    return model, names


@torch.no_grad()
def export_reward_model(
    network: RewardNetwork, model_dir: Path, out_dir: Path, ranks: Ranks, *, padding: int,
    chat_template: str | None = None,
) -> Path:
    """Write it with its tokenizer as a sequence classifier of one label; a collective call.

    Args:
        padding: the token that batches are padded with.
        chat_template: as of `learner.publish.export.export_model`.
    """
    weights = {}
    for name, tensor in policy_tensors(network):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if ranks.rank == 0:
            weights[name] = whole.detach().to("cpu", travels_as(tensor, torch.float32), copy=True)
    if ranks.rank == 0:
        model, names = _as_classifier(network, model_dir)
        weights = {names[name]: one for name, one in weights.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.config.pad_token_id = padding
        model.save_pretrained(out_dir, state_dict=weights)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(out_dir)
        set_chat_template(out_dir, chat_template)
    ranks.barrier()
    return out_dir


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
        """The sum over the units of a micro-batch, 0-d with gradients, and further measurements."""
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
    """Base of the methods that read pairs.

    Args:
        max_tokens: a longer side of a pair is cut to so many.
    """

    def __init__(self, encoder: Encoder, data: DataConfig, max_tokens: int) -> None:
        self._encoder, self._max_tokens = encoder, max_tokens
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
    """Direct preference optimization (Rafailov et al. 2023), with label smoothing and an SFT term; IPO, SimPO, ORPO.

    Args:
        reference: None for the losses that compare log-probs of the policy alone.
    """

    def __init__(
        self, policy: Policy, reference: FrozenPolicy | None, encoder: Encoder, data: DataConfig,
        settings: DpoConfig, *, max_tokens: int,
    ) -> None:
        super().__init__(encoder, data, max_tokens)
        self.network, self._reference, self._settings = policy, reference, settings

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Measured]:
        settings = self._settings
        before = 0.0 if self._reference is None else self._reference.score(batch)
        logprobs = logprobs_of(self.network, batch)
        chosen, rejected = sums_of_sides(batch, settings.beta * (logprobs - before))
        counts, others = (count.clamp(min=1.0) for count in sums_of_sides(batch, torch.ones_like(logprobs)))
        if settings.loss is not DpoLoss.sigmoid:
            chosen, rejected = chosen / counts, rejected / others
        loss = preference_loss(settings, chosen, rejected)
        sft_weight = 1.0 if settings.loss is DpoLoss.orpo else settings.sft_weight
        if sft_weight:
            nats, _ = sums_of_sides(batch, -logprobs)
            loss = loss + sft_weight * nats / counts
        return loss.sum(), self.measured(chosen.detach(), rejected.detach())


def preference_loss(settings: DpoConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    """The loss of each pair by the rewards of its answers, [S]; in docs/supervised.md."""
    beta, smoothing = settings.beta, settings.label_smoothing
    difference = chosen - rejected
    if settings.loss is DpoLoss.ipo:
        return (difference / beta - 0.5 / beta).square()
    if settings.loss is DpoLoss.orpo:
        return -beta * F.logsigmoid(_log_odds(chosen / beta) - _log_odds(rejected / beta))
    if settings.loss is DpoLoss.simpo:
        difference = difference - settings.margin
    return -(1.0 - smoothing) * F.logsigmoid(difference) - smoothing * F.logsigmoid(-difference)


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)); of a certain answer, which has none, a large one without a gradient."""
    logprobs = logprobs.clamp(max=-1e-6)
    return logprobs - torch.log(-torch.expm1(logprobs))


def check_losses(dpo: DpoConfig, reference: ReferenceConfig) -> None:
    """Raise ConfigError for a setting that does nothing with this loss."""
    loss = dpo.loss
    found = []
    if dpo.margin and loss is not DpoLoss.simpo:
        found.append("dpo.margin")
    if dpo.label_smoothing and loss in (DpoLoss.ipo, DpoLoss.orpo):
        found.append("dpo.label_smoothing")
    if dpo.sft_weight and loss is DpoLoss.orpo:
        found.append("dpo.sft_weight")
    if reference.model_path and not needs_reference(dpo):
        found.append("reference.model_path")
    if found:
        raise ConfigError(
            f"{found[0]} does nothing with dpo.loss={loss}: "
            "leave it out, or choose another loss"
        )


def needs_reference(dpo: DpoConfig) -> bool:
    """Tell whether the loss compares with a reference model."""
    return dpo.loss in (DpoLoss.sigmoid, DpoLoss.ipo)


class RewardModel(_OfPairs):
    """Bradley-Terry: the better answer's score is to be greater, by the record's margin.

    A score is read at the last token, where `AutoModelForSequenceClassification` reads it: the one before trailing
    tokens of padding. A token of no meaning after it makes the packing give its place.
    """

    def __init__(self, network: RewardNetwork, encoder: Encoder, data: DataConfig, *, max_tokens: int) -> None:
        super().__init__(encoder, data, max_tokens)
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
