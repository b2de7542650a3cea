"""`streamrl.Trainer`: training on recorded groups in this process, without hub, actors and run directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from learner.setup.preflight import check_losses, check_models
from learner.setup.trainer import save_policy, steered_trainer
from learner.sources.recorded import RecordedBatches
from streamrl.api.overrides import words_of
from streamrl.config.load import load_config
from streamrl.messages import Group, Member, MemberStatus, Outcome, ReturnReason, Sampling, Span, Turn
from streamrl.messages.codec import encode, pack_ids, pack_logprobs

log = logging.getLogger("streamrl.learner")


class Trainer:
    """A policy that is trained on batches of recorded groups, by the settings of a run.

    Example:
        trainer = streamrl.Trainer("models/smollm2-135m", algorithm="grpo")
        for groups in batches:
            print(trainer.train(groups)["policy/loss"])
        trainer.save("trained")

    Args:
        model: a local checkpoint directory, or a model of the hub.
        overrides: `key=value`, as on the command line.
        settings: every other keyword is a setting, with two underscores for each dot.
    Raises:
        ConfigError: a setting is unknown or impossible, or there is no such model.
    """

    def __init__(self, model: str | os.PathLike[str], overrides: Sequence[str] = (), **settings: Any) -> None:
        self._config = load_config([*overrides, *words_of({"policy__model_path": model, **settings})])
        check_models(self._config, log.info)
        check_losses(self._config)
        self._model_dir = Path(str(self._config.policy.model_path))
        self._trainer, self._staleness = steered_trainer(self._config, self._model_dir)

    @property
    def version(self) -> int:
        """Optimizer steps done; a group may hold tokens of this version or of earlier ones."""
        return self._trainer.version

    def train(self, groups: Iterable[Group | bytes]) -> dict[str, Any]:
        """Train on one batch; its metrics, under the names that a run gives them.

        Args:
            groups: as `recorded_group` makes them, or the frames that actors sent.
        Raises:
            WireError: a group cannot be read, has tokens of a later version or outside the vocabulary; or there is
                no group, or a number of them that `learner.num_minibatches` does not divide.
        """
        frames = [one if isinstance(one, bytes) else bytes(encode(one)) for one in groups]
        source = RecordedBatches(
            [frames], num_minibatches=self._config.learner.num_minibatches,
            vocab_size=self._trainer.networks.policy.vocab_size,
        )
        batch = source.next_batch(self.version)
        assert batch is not None
        trained = self._trainer.train_batch(batch.rows, batch.plan, lag_policy=self._staleness.lag_policy)
        result = {"policy/grad_norm": trained.result.grad_norm, "policy/lr": trained.result.lr}
        return {**trained.measured.flush(self._trainer.step), **result}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the policy as a Hugging Face checkpoint; a folder of that name is replaced.

        A LoRA adapter is merged into it, and stands alone in its folder `adapter`.
        """
        return save_policy(self._config, self._trainer, self._model_dir, Path(folder))


def recorded_group(
    group_id: int, prompt_ids: Sequence[int], answers: Sequence[tuple[Sequence[int], Sequence[float], float]], *,
    version: int = 0, temperature: float = 1.0,
) -> Group:
    """A group of single-turn answers to one prompt.

    Args:
        group_id: of no other group of its batch.
        prompt_ids: token ids of the prompt.
        answers: of each its token ids, their natural log-probs under the distribution that they were sampled from, and
            its reward.
        version: optimizer steps after which the policy sampled them.
        temperature: that they were sampled at.
    """
    def plain(value: Any) -> Any:
        value = value.item() if callable(getattr(value, "item", None)) else value  # a scalar of numpy or torch
        return float(value) if isinstance(value, bool) else value

    members = tuple(
        Member(
            index=index, status=MemberStatus.FINISHED, prompt_ids=pack_ids(list(prompt_ids)),
            token_ids=pack_ids(list(token_ids)), logprobs=pack_logprobs(list(logprobs)), mask=((0, len(token_ids)),),
            versions=(Span(0, plain(version), 0, len(token_ids)),), turns=(Turn(0, len(token_ids), plain(reward)),),
            reward=plain(reward), scores={}, finish="stop",
        )
        for index, (token_ids, logprobs, reward) in enumerate(answers)
    )
    return Group(
        incarnation=1, seq=1, group_id=plain(group_id), attempt=0, outcome=Outcome.COMPLETE, reason=ReturnReason.NONE,
        detail="", sampling=Sampling(plain(temperature)), members=members, stats={},
    )
