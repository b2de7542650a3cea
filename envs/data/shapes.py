"""The fields of a record that hold its prompt and its right answer, under whatever names it came with.

    {"question": "2 + 2 = ?", "answer": "4"}                         a text
    {"messages": [{"role": "user", "content": ...}], "answer": ...}  a conversation
    {"messages": {"role": "user", "content": ...}, "gt_answer": ...} one message
    {"prompt": [...], "reward_model": {"ground_truth": ...}}         a field inside a field

Every other field stays in the record, under its own name. Messages of errors name the field; who reads the file puts
the file and the record's number before them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.environment import ChatMessage, Record
from streamrl.errors import TaskError
from streamrl.messages.actors import MAX_RECORD_BYTES

PROMPT_KEYS = ("messages", "prompt", "question", "problem", "instruction", "query", "input")
ANSWER_KEYS = (
    "answer", "gt_answer", "ground_truth", "final_answer", "solution", "label", "target", "reward_model.ground_truth",
)
"""Where prompt and answer are looked for, in this order, unless a setting says where."""
ASCII = "".join(map(chr, range(ord(" "), ord("~") + 1))) + "\n"
"""Characters for the vocabulary of a tiny model whose prompts nobody knows before the run."""
MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Reads prompt and answer of a record; keys that are None are found in each record."""

    prompt_key: str | None = None
    answer_key: str | None = None

    def prompt_field(self, record: Record) -> str:
        """The name of the field that holds the prompt. Raises TaskError: none does, or another may be meant as well."""
        if self.prompt_key is not None:
            if lookup(record, self.prompt_key) is MISSING:
                raise TaskError(f"no field {self.prompt_key!r} (data.prompt_key); it has {shown_fields(record)}")
            return self.prompt_key
        found = [key for key in PROMPT_KEYS if lookup(record, key) is not MISSING]
        if not found:
            raise TaskError(
                f"no prompt: it has {shown_fields(record)}, none of {', '.join(PROMPT_KEYS)}; name it: "
                "data.prompt_key=..."
            )
        if len(found) > 1:
            said = "\n".join(_texts(self.prompt_in(record, found[0])))
            for other in found[1:]:
                if any(text not in said for text in _texts(record[other])):
                    raise TaskError(
                        f"fields {found[0]!r} and {other!r} may both hold the prompt, and the first has not the words "
                        f"of the second: say which with data.prompt_key={found[0]}"
                    )
        return found[0]

    def prompt_in(self, record: Record, field: str) -> Any:
        """The prompt that this field holds; an instruction is followed by its input, as in the data of Alpaca."""
        value, joined = lookup(record, field), self.prompt_key is None and field == "instruction"
        return with_input(value, record.get("input")) if joined else value

    def prompt(self, record: Record) -> Any:
        """The prompt as the record holds it: a text, a list of messages or one message."""
        return self.prompt_in(record, self.prompt_field(record))

    def messages(self, record: Record) -> list[ChatMessage]:
        """The conversation that opens the episode."""
        field = self.prompt_field(record)
        return conversation(field, self.prompt_in(record, field))

    def opening(self, record: Record) -> list[ChatMessage]:
        """The same for a loop that decides what the model reads; it makes its own prompts where it gets seeds alone."""
        return [ChatMessage("user", ASCII)] if record.keys() == {"seed"} else self.messages(record)

    def answer(self, record: Record) -> Any:
        """The right answer as the record holds it, or None."""
        if self.answer_key is not None:
            found = lookup(record, self.answer_key)
            if found is MISSING:
                raise TaskError(f"no field {self.answer_key!r} (data.answer_key); it has {shown_fields(record)}")
            return found
        return next((value for key in ANSWER_KEYS if (value := lookup(record, key)) not in (MISSING, None)), None)

    def required_answer(self, record: Record) -> Any:
        """The right answer. Raises TaskError if the record has none."""
        answer = self.answer(record)
        if answer is None or answer == "":
            raise TaskError(
                f"no right answer: it has {shown_fields(record)}; name the field: data.answer_key=..."
            )
        return answer

    def check(self, record: Record) -> None:
        """Raise TaskError, naming the field, for a record that cannot be played."""
        self.messages(record)
        self.answer(record)
        tool_schemas(record)
        if record.get("test_cases") is not None:
            code_tests(record)
        try:
            text = json.dumps(record, allow_nan=False)
            if "\\u" in text:
                _encodable(record)
        except (TypeError, ValueError, RecursionError):
            for key, value in record.items():
                _check_json(key, value)
            raise
        if len(text) > MAX_RECORD_BYTES:
            raise TaskError(too_long(record))


def too_long(record: Record) -> str:
    """Explain why a record of more than MAX_RECORD_BYTES cannot be leased, with its longest field."""
    sizes = {key: len(json.dumps(value)) for key, value in record.items()}
    longest = max(sizes, key=sizes.__getitem__)
    return (f"it has {len(json.dumps(dict(record))):,} bytes as JSON, {sizes[longest]:,} of them in field {longest!r}: "
            f"at most {MAX_RECORD_BYTES:,} reach an actor")


def _check_json(key: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
        _encodable([key, value])
    except UnicodeEncodeError as error:
        raise TaskError(f"field {key!a} holds half a character, {error.object[error.start]!a}: leave it out") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"field {key!r} holds {shown(value)}, which JSON cannot carry ({error})") from error


def _encodable(value: Any) -> None:
    """Raise UnicodeEncodeError for half of a surrogate pair, which JSON can name and no message can carry."""
    json.dumps(value, ensure_ascii=False).encode()


def with_input(instruction: Any, given: Any) -> Any:
    """An instruction with what it is to be done with, if both are texts."""
    texts = isinstance(instruction, str) and isinstance(given, str)
    return f"{instruction}\n\n{given}" if texts and given.strip() else instruction


def _texts(prompt: Any) -> list[str]:
    """The texts of a prompt in any of its forms; none of a value that is no prompt."""
    value = json_or_text(prompt) if isinstance(prompt, str) and prompt.lstrip().startswith(("[", "{")) else prompt
    messages = value if isinstance(value, list | tuple) else [value]
    found = [message.get("content") if isinstance(message, Mapping) else message for message in messages]
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def lookup(record: Record, key: str) -> Any:
    """The field of this name, or what `outer.inner` names inside a mapping; MISSING if there is none."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def conversation(field: str, value: Any) -> list[ChatMessage]:
    """Messages that the model answers, as `turns`. Raises TaskError naming the field."""
    messages = turns(field, value)
    if messages[-1].role == "assistant":
        raise TaskError(
            f"field {field!r} ends with an assistant message: leave it out, the model writes the next one "
            "(a right answer belongs into a field of its own, such as answer)"
        )
    return messages


def turns(field: str, value: Any) -> list[ChatMessage]:
    """Messages from a text, a list of messages or one message. Raises TaskError naming the field."""
    if isinstance(value, str) and field == "messages" and value.lstrip().startswith(("[", "{")):
        value = _parsed(field, value)  # a column of a CSV or Parquet file that holds JSON
    if isinstance(value, str):
        if not value.strip():
            raise TaskError(f"field {field!r} is empty")
        return [ChatMessage("user", value)]
    found = [value] if isinstance(value, Mapping) else value
    if not isinstance(found, list | tuple) or not found:
        raise TaskError(f'field {field!r} is {shown(value)}: give a text, or a list of {{"role": ..., "content": ...}}')
    messages = []
    for number, turn in enumerate(found, 1):
        where = f"field {field!r}, message {number}"
        try:
            messages.append(ChatMessage.of(turn))
        except TaskError as error:
            raise TaskError(f"{where} {error}") from error
    return messages


def code_tests(record: Record) -> dict[str, Any]:
    """The programs' tests of a record: {"inputs": [text ...], "outputs": [text ...]}, perhaps with `fn_name`.

    Raises TaskError: not a mapping (or JSON of one), lists of unequal lengths, or anything but texts in them.
    """
    cases = record.get("test_cases")
    if isinstance(cases, str):
        cases = _parsed("test_cases", cases)
    if not isinstance(cases, Mapping):
        raise TaskError(f'field \'test_cases\' is {shown(cases)}: give {{"inputs": [...], "outputs": [...]}}')
    for side in ("inputs", "outputs"):
        texts = cases.get(side)
        if not isinstance(texts, list | tuple) or not texts:
            raise TaskError(f"field 'test_cases' has {shown(texts)} as its {side}: give a list of texts")
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise TaskError(f"field 'test_cases' has {shown(text)} as number {number} of its {side}: give a text")
    if len(cases["inputs"]) != len(cases["outputs"]):
        raise TaskError(
            f"field 'test_cases' has {len(cases['inputs'])} inputs and {len(cases['outputs'])} outputs: give one "
            "output for each input"
        )
    return dict(cases)


def tool_schemas(record: Record) -> list[Mapping[str, Any]]:
    """The JSON schemas in the record's field `tools`, for the chat template; none if it has no such field."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed("tools", tools)
    if not tools:
        return []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise TaskError(f"field 'tools' is {shown(tools)}: give a list of JSON schemas, one for each tool")
    return list(tools)


def _parsed(field: str, text: str) -> Any:
    try:
        found = json.loads(text)
        if "\\u" in text:
            _encodable(found)
        return found
    except (ValueError, RecursionError) as error:
        raise TaskError(f"field {field!r} holds text that is not JSON ({error}): {text:.60}") from error


def json_or_text(text: str) -> Any:
    """The JSON value that a text is; the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def shown(value: Any) -> str:
    """A value and its type, cut to one line."""
    return "missing" if value is MISSING else f"{value!r:.60} ({type(value).__name__})"


def shown_fields(record: Record) -> str:
    """The record's fields, or that it has none."""
    return f"the fields {', '.join(map(str, list(record)[:12]))}" if record else "no fields"
