"""Records of supervised training: conversations with their answers, and pairs of a better and a worse one.

    {"messages": [..., {"role": "assistant", "content": ...}]}                     every answer in it is learned
    {"prompt": text or messages, "completion": text or messages}                   also: response, answer, ...
    {"prompt": ..., "chosen": text or messages, "rejected": ..., "margin": 0.5}    the last two may hold the whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

import numpy as np

from envs.data.shapes import ANSWER_KEYS, MISSING, RecordShape, conversation, lookup, shown, shown_fields, tool_schemas
from envs.data.shapes import turns as messages_of
from learner.data.trajectories import Trajectory
from learner.supervised.rendering import Encoded
from streamrl.config.schema import DataConfig
from streamrl.environment import ChatMessage, Record
from streamrl.errors import ConfigError, TaskError

COMPLETION_KEYS = ("completion", "response", "output", *ANSWER_KEYS)


@dataclass(frozen=True, slots=True)
class AnswerShape(RecordShape):
    """A conversation that holds the model's answers, or a prompt and its answer."""

    def whole(self, record: Record, key: str) -> list[ChatMessage]:
        """The conversation that ends with the answer in this field, which may hold all of it."""
        return self._with_answer(record, key, lookup(record, key))

    def _with_answer(self, record: Record, key: str, value: Any) -> list[ChatMessage]:
        if isinstance(value, str) and not value:
            raise TaskError(f"field {key!r} is empty: give the answer")
        answer = messages_of(key, {"role": "assistant", "content": value} if isinstance(value, str) else value)
        if answer[-1].role != "assistant":
            raise TaskError(
                f"field {key!r} ends with a message of {answer[-1].role}: leave it out, so that the assistant's is last"
            )
        if answer[0].role != "assistant":
            return answer
        prompt = RecordShape.prompt_field(self, record)
        return [*conversation(prompt, self.prompt_in(record, prompt)), *answer]

    def messages(self, record: Record) -> list[ChatMessage]:
        """The conversation with every answer. Raises TaskError naming the field."""
        prompt = self.prompt_field(record)
        found = messages_of(prompt, self.prompt_in(record, prompt))
        if found[-1].role == "assistant":
            return found
        keys = COMPLETION_KEYS if self.answer_key is None else (self.answer_key,)
        key = next((key for key in keys if lookup(record, key) not in (MISSING, None)), None)
        if key is None:
            raise TaskError(
                f"no answer: field {prompt!r} does not end with an assistant message, and of {', '.join(keys)} it has "
                f"none ({shown_fields(record)}); name the field: data.answer_key=..."
            )
        value = lookup(record, key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return self._with_answer(record, key, str(value) if number else value)  # a number as CSV has it

    def conversations(self, record: Record) -> list[list[ChatMessage]]:
        """Every conversation that is trained on. Raises TaskError naming the field."""
        return [self.messages(record)]

    def check(self, record: Record) -> None:
        """Raise TaskError, naming the field, for a record that cannot be trained on."""
        self.messages(record)
        tool_schemas(record)


@dataclass(frozen=True, slots=True)
class PairShape(AnswerShape):
    """A prompt with a better and a worse answer, or two whole conversations."""

    chosen_key: str = "chosen"
    rejected_key: str = "rejected"

    def prompt_field(self, record: Record) -> str:
        """The name of the field that holds the prompt; where the answers hold it, the better one's."""
        value = lookup(record, self.chosen_key)
        first = value[0] if isinstance(value, list) and value else None
        whole = isinstance(first, Mapping) and first.get("role") != "assistant"
        return self.chosen_key if whole else RecordShape.prompt_field(self, record)

    def pair(self, record: Record) -> tuple[list[ChatMessage], list[ChatMessage]]:
        """The conversations with the better and the worse answer. Raises TaskError naming the field."""
        for key, setting in ((self.chosen_key, "chosen_key"), (self.rejected_key, "rejected_key")):
            if lookup(record, key) in (MISSING, None):
                raise TaskError(f"no field {key!r} (data.{setting}); it has {shown_fields(record)}")
        return self.whole(record, self.chosen_key), self.whole(record, self.rejected_key)

    def conversations(self, record: Record) -> list[list[ChatMessage]]:
        return list(self.pair(record))

    @staticmethod
    def margin(record: Record) -> float:
        """How much better the better answer is at least."""
        margin = record.get("margin")
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
            raise TaskError(f"field 'margin' is {shown(margin)}: give a number, or leave it out")
        return float(margin)

    def check(self, record: Record) -> None:
        self.pair(record)
        self.margin(record)
        tool_schemas(record)


def shape_of(data: DataConfig, *, pairs: bool) -> AnswerShape:
    """What reads the records that the settings describe."""
    if not pairs:
        return AnswerShape(data.prompt_key, data.answer_key)
    if data.train_roles != ["assistant"]:
        raise ConfigError(
            f"data.train_roles={data.train_roles} is for sft: pairs compare answers of the assistant; leave it out"
        )
    return PairShape(data.prompt_key, data.answer_key, chosen_key=data.chosen_key, rejected_key=data.rejected_key)


def row_of(place: int, sides: list[Encoded], *, margin: float = 0.0) -> Trajectory | None:
    """One encoded conversation, or both of a pair, to be packed; None if one has nothing to train on.

    The tokens of the second have turn 1; the pair's margin is the reward of its first token.
    """
    parts = []
    for ids, mask in sides:
        if not mask.any():
            return None
        first = int(mask.argmax())
        parts.append((ids[:first], ids[first:], mask[first:]))
    token_ids, mask = (np.concatenate([part[at] for part in parts]) for at in (1, 2))
    turns = np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])
    rewards = np.zeros(len(mask), np.float32)
    rewards[0] = margin
    return Trajectory(
        group_id=place, index=0, prompt_ids=parts[0][0], token_ids=token_ids, mask=mask, turns=np.where(mask, turns, 0),
        logprobs=np.zeros(len(mask), np.float32), versions=np.where(mask, 0, -1), rewards=rewards, reward=margin,
        num_turns=len(parts), scores={}, temperature=1.0, truncated=False,
        later=tuple((len(parts[0][1]), part[0]) for part in parts[1:]),
    )


@lru_cache(maxsize=2)
def _order(num_records: int, seed: int, number: int) -> np.ndarray:
    return np.random.default_rng([seed, number]).permutation(num_records)


def places_of(step: int, size: int, num_records: int, *, seed: int, shuffle: bool) -> list[int]:
    """The records of a step, counted from 0; each pass has an order of its own and drops the last partial batch.

    Raises ConfigError: there are fewer records than a batch has.
    """
    if size > num_records:
        raise ConfigError(
            f"rollout.num_prompts_per_step={size} is more than the {num_records} training records: lower it"
        )
    number, at = divmod(step, num_records // size)
    order: Any = _order(num_records, seed, number) if shuffle else range(num_records)
    return [int(place) for place in order[at * size : (at + 1) * size]]
