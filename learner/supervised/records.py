"""Records of supervised training: conversations with their answers, and pairs of a better and a worse one.

    {"messages": [..., {"role": "assistant", "content": ...}]}                     every answer in it is learned
    {"prompt": text or messages, "completion": text or messages}                   also: response, answer, ...
    {"prompt": ..., "chosen": text or messages, "rejected": ..., "margin": 0.5}    the last two may hold the whole

`Encoder` gives the ids of a model's chat template, and which of them the assistant says. The ids are those of the whole
rendering. A template may cut, strip or move what it renders, so the place of an answer is found by rendering the
conversation with a mark in its place: both texts are the same before and after it. To the answer belong what the
template writes between its header and the answer, and the special token that ends the turn.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from envs.data.chat_template import Form, Tools, plain_text, rendered, template_forms, template_text
from envs.data.shapes import ANSWER_KEYS, MISSING, RecordShape, conversation, lookup, shown, shown_fields, tool_schemas
from envs.data.shapes import turns as messages_of
from learner.data.trajectories import Trajectory
from streamrl.config.schema import DataConfig
from streamrl.environment import SYSTEM_ROLES, THOUGHTS, ChatMessage, Record
from streamrl.errors import ConfigError, TaskError

_MARK, _NAME = "\ue0f0mark\ue0f1", "\ue0f0name\ue0f1"
_MARKS = re.compile(f"{_MARK}|{_NAME}")
Encoded = tuple[np.ndarray, np.ndarray]
"""int32 [N] token ids, and bool [N] which of them are trained on."""


class Encoder:
    """Encodes conversations with the tokenizer of a model, by the settings of `data`.

    Raises ConfigError: its tokenizer does not tell which characters a token stands for.
    """

    def __init__(self, model_dir: Path, data: DataConfig) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"policy.model_path={model_dir}: its tokenizer does not tell which text a token stands for; save it as "
                "a fast one (tokenizer.json)"
            )
        if data.chat_template is not None:
            self.tokenizer.chat_template = data.chat_template
        self._roles = frozenset(data.train_roles)
        if not self._roles or self._roles - {"assistant", "tool", "user", "system"}:
            raise ConfigError(
                f"data.train_roles={data.train_roles} must name one or more of assistant, tool, user, system"
            )
        self._system_prompt = data.system_prompt
        self._template = template_text(self.tokenizer) if data.apply_chat_template else ""
        self.chat = bool(self._template)
        self._opening = opening_of(self.tokenizer)

    def encode(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> Encoded:
        """Ids and mask of a conversation. Raises TaskError: the template refuses it."""
        if self._system_prompt is not None and messages[0].role not in SYSTEM_ROLES:
            messages = [ChatMessage("system", self._system_prompt), *messages]
        if not self.chat:
            return self._encode_plain(messages)
        text, spans = self.render(messages, tools)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, mask = np.array(found["input_ids"], np.int32), np.zeros(len(found["input_ids"]), bool)
        starts, ends = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        for first, last in spans:
            mask |= (starts < last) & (ends > first)
        mask[:1] = False  # nothing predicts it
        return ids, mask

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and first and last character (exclusive) of the trained part of each turn."""
        forms = template_forms(messages, self._template)
        text, spans, done = self._rendered(forms, tools), [], 0
        for at, message in enumerate(messages):
            if message.role in self._roles:
                spans.append(self._span(text, forms, at, tools, done))
                done = spans[-1][1]
        return text, spans

    def _span(self, text: str, messages: list[Form], at: int, tools: Tools, done: int) -> tuple[int, int]:
        before, message = messages[:at], _marked(messages[at])
        other = self._rendered([*before, message, *messages[at + 1 :]], tools)
        calls = message.get("tool_calls")
        if calls and not _MARKS.search(other):
            # It may write ids in place of names.
            message = _marked(messages[at], "id")
            other = self._rendered([*before, message, *messages[at + 1 :]], tools)
        if not _MARKS.search(other):
            raise TaskError(
                f"the chat template leaves out message {at + 1}, of {messages[at]['role']}: give another with "
                "data.chat_template"
            )
        first = len(os.path.commonprefix([text, other]))
        last = max(first, len(text) - len(os.path.commonprefix([text[::-1], other[::-1]])))
        alone = self._rendered([*before, message], tools)
        header = self._header(before, tools) if messages[at]["role"] == "assistant" else ""
        begun = text.rfind(header, done, first) if header else -1
        if begun >= 0:
            first = begun + len(header)
        elif calls:
            first = max(done, first - self._num_opening(text[:first], alone, before, tools))
        if not calls:
            rest = alone.rpartition(_MARK)[2]
            same = os.path.commonprefix([text[last:], rest])
            return first, last + self._num_closing(same)
        last, rest = _after_names(text, first, last, messages[at], other, alone)
        same = os.path.commonprefix([text[last:], rest])
        return first, last + self._num_closing_calls(same, header)

    def _num_opening(self, text: str, alone: str, before: list[Form], tools: Tools) -> int:
        """The number of characters, at the end of this text, that the template writes before the name of a call.

        An answer without calls in the place of the calls has the same text before it.
        """
        bare = self._rendered([*before, {"role": "assistant", "content": _MARK}], tools)
        opening = _MARKS.split(alone[len(os.path.commonprefix([alone, bare])) :])[0]
        return len(opening) if text.endswith(opening) else 0

    @property
    def _tokens(self) -> list[str]:
        return [*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()]

    def _num_closing(self, same: str) -> int:
        """The number of characters with which the model ends its turn, after the last that depends on its contents.

        Args:
            same: all that follows, as far as it also does where the conversation ends here: the token that ends a turn,
                not the header of the next one, stands in both.
        """
        longest = sorted(self._tokens, key=len, reverse=True)
        tokens = "|".join(map(re.escape, longest))
        found = re.match(tokens, same)
        end = self.tokenizer.eos_token
        if end:  # some write a space or another one before it
            before = rf"\s*(?:{tokens})*?"
            found = re.match(before + re.escape(end), same) or found
        return found.end() if found else 0

    def _num_closing_calls(self, same: str, header: str) -> int:
        """The same after the name of the last call: its arguments, the end of the call, and of the turn."""
        for one in self._tokens:
            if header.startswith(one):  # it opens another turn
                same = same.partition(one)[0]
        end = self.tokenizer.eos_token
        if end and end in same:
            return same.index(end) + len(end)
        ends = [same.rfind(one) + len(one) for one in self._tokens if one in same]
        return max(ends, default=len(same.rstrip()))

    def _header(self, before: list[Form], tools: Tools) -> str:
        """The template's opening of the assistant's turn, of which the model knows nothing but that it is there."""
        try:
            open_, closed = (
                self._rendered(before, tools, add_generation_prompt=asked) for asked in (True, False)
            )
        except TaskError:
            return ""  # a conversation that begins with the assistant
        return open_[len(closed) :] if open_.startswith(closed) else ""

    def _rendered(self, messages: list[Form], tools: Tools, **options: Any) -> str:
        try:
            return rendered(self.tokenizer, messages, tools, **options)
        except TaskError:
            raise
        except Exception as error:  # a template raises what it likes
            raise TaskError(
                f"the chat template refuses the {len(messages)} messages ({error}): change them, or give another "
                "template with data.chat_template"
            ) from error

    def _encode_plain(self, messages: Sequence[ChatMessage]) -> Encoded:
        """Contents without a template, joined by line breaks, after the tokens that begin every text of an actor.

        An answer ends with the end of sequence.
        """
        ids: list[int] = []
        mask: list[bool] = []
        end = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
        for message, following in zip(messages, [*messages[1:], None], strict=True):
            said = message.role == "assistant"
            trained = message.role in self._roles
            joined = not said and following is not None and following.role != "assistant"
            part = self.tokenizer(plain_text(message) + "\n" * joined, add_special_tokens=False)["input_ids"]
            part += end if said and part[-1:] != end else []
            ids += part
            mask += [trained] * len(part)
        if ids[: len(self._opening)] != self._opening:  # a prompt of a log has them
            ids, mask = [*self._opening, *ids], [False] * len(self._opening) + mask
        mask[:1] = [False] * len(mask[:1])
        return np.array(ids, np.int32), np.array(mask, bool)


def opening_of(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text, such as the one that begins a sequence."""
    bare, whole = (tokenizer("a", add_special_tokens=asked)["input_ids"] for asked in (False, True))
    return whole[: next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)]


def plain_template(tokenizer: Any) -> str:
    """The text of conversations that have no template, as a template: a reward model's reader knows no other way."""
    opening, end = (json.dumps(text) for text in (tokenizer.decode(opening_of(tokenizer)), tokenizer.eos_token or ""))
    return (
        "{% if not messages[0].content.startswith(" + opening + ") %}{{ " + opening + " }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}"
        "{% if not message.content.endswith(" + end + ") %}{{ " + end + " }}{% endif %}"
        "{% elif not loop.last and messages[loop.index].role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
    )


def _marked(message: Form, part: str = "name") -> Form:
    """The message with marks in place of its contents; arguments of calls follow their names (or ids)."""
    marked = {
        key: _MARK for key in ("content", *THOUGHTS)
        if message.get(key) or (key == "content" and not message.get("tool_calls"))
    }
    if message.get("tool_calls"):
        marked["tool_calls"] = [_with_mark(call, part) for call in message["tool_calls"]]
    return {**message, **marked}


def _with_mark(call: Form, part: str) -> Form:
    marked = {part: _NAME}
    if part == "name" and "function" in call:
        marked = {**call["function"], **marked}
        return {**call, "function": marked}
    return {**call, **marked}


def _after_names(text: str, first: int, last: int, message: Form, other: str, alone: str) -> tuple[int, str]:
    """The place in the text after the last name of the message's calls, and what follows it in `alone`.

    A template may write the names again with the results, which are not the message's; `other` and `alone` hold marks
    in place of the names, `alone` ends with the message.
    """
    number = alone.count(_NAME)
    if not 0 < number < other.count(_NAME):
        return last, _MARKS.split(alone)[-1]
    calls = message["tool_calls"]
    names = (call.get("function", call)["name"] for call in calls)
    either = "|".join(map(re.escape, names))
    rest = re.escape(_NAME.join(other.split(_NAME)[number:]))
    rest = rest.replace(re.escape(_NAME), f"(?:{either})")
    rest = rest.replace(re.escape(_MARK), ".*?")
    ending = re.compile(rest + r"\Z", re.DOTALL)
    found = ending.search(text, first)
    place = found.start() if found else last
    return place, _NAME.join(alone.split(_NAME)[number:])


COMPLETION_KEYS = ("completion", "response", "output", *sorted(ANSWER_KEYS, key="final_answer".__eq__))
"""A worked solution is learned before a final answer alone."""


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
        """Smallest margin by which the better answer is better."""
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
    """The reader of the records that the settings describe."""
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
    return places_from(start_of(step, size, num_records), size, num_records, seed=seed, shuffle=shuffle)


def start_of(step: int, size: int, num_records: int) -> tuple[int, int]:
    """The pass of a step, counted from 0, and how many of its records come before, where all batches have one size."""
    number, at = divmod(step, num_records // size)
    return number, at * size


def start_after(start: tuple[int, int], size: int, num_records: int) -> tuple[int, int]:
    """Where a batch of this size begins: there, or where too few records are left, with the next pass."""
    number, read = start
    return (number, read) if read + size <= num_records else (number + 1, 0)


def places_from(
    start: tuple[int, int], size: int, num_records: int, *, seed: int, shuffle: bool
) -> list[int]:
    """The records of a batch that begins there."""
    number, read = start
    order: Any = _order(num_records, seed, number) if shuffle else range(num_records)
    return [int(place) for place in order[read : read + size]]
