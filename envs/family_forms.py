"""Turns that a family of models writes in tokens of its own, rewritten as <think>...</think>, <tool_call> and text.

    gpt-oss         <|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>A
                    <|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "3+4"}
    Gemma 4         <|channel>thought\\nT<channel|>A<|tool_call>call:calculator{expression:<|"|>3+4<|"|>}<tool_call|>
    FunctionGemma   <start_function_call>call:calculator{expression:<escape>3+4<escape>}<end_function_call>
    Mistral         [THINK]T[/THINK]A, and [TOOL_CALLS]calculator[ARGS]{"expression": "3+4"}, which is read as it is
    Seed-OSS        <seed:think>T</seed:think>A
    Cohere          <|START_THINKING|>T<|END_THINKING|><|START_RESPONSE|>A<|END_RESPONSE|>

Most of these are special tokens, which a plain decoding leaves out: what is thought, called and said runs together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Decode = Callable[[list[int]], str]
_CHANNELS = ("<|channel|>", "<|message|>")
_CHANNELED = (*_CHANNELS, "<|start|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
"""Shown where there are channels: elsewhere <|end|> is the end of a turn."""
_OWN_THOUGHTS = {"[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}
"""Thoughts that templates leave as they stand in the content."""
_REWRITTEN = (*_OWN_THOUGHTS, "<|channel>", "<|tool_call>", "<start_function_call>", "<|START_THINKING|>")
_MARKS = (
    *_REWRITTEN,
    *_OWN_THOUGHTS.values(),
    "<think>",
    "</think>",
    "<channel|>",
    "<|END_THINKING|>",
    "<tool_call|>",
    '<|"|>',
    "<end_function_call>",
    "<escape>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|python_tag|>",
    "<function_calls>",
    "</function_calls>",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<function_call>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|action_start|>",
    "<|action_end|>",
    "<|plugin|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
)
"""Marks of thoughts and calls that are read, also where a tokenizer has them as special tokens."""
_OPENINGS = re.compile(r"<\|channel>\w*\n?|\[THINK\]|<seed:think>|<\|START_THINKING\|>")
_CLOSINGS = re.compile(r"<channel\|>|\[/THINK\]|</seed:think>|<\|END_THINKING\|>")
_AROUND = re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)")
_HEADER = re.compile(r"<\|(?:start|channel|constrain|end)\|>")
_SENT = re.compile(r"\bto=([\w.-]+)")
_CALL = re.compile(
    r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)|<start_function_call>(.*?)(?:<end_function_call>|\Z)", re.DOTALL
)
FAMILY_CALLS = re.compile(r"<\|channel\|>|<\|message\|>|<\|tool_call>|<start_function_call>")
"""The beginnings of calls that `rewritten` changes."""
_CALLED = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_WORD = re.compile(r"[^{}\[\],:]+")
_PLAIN = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
OPENED = (
    "<think>", "<|channel>thought", "<|channel|>analysis<|message|>", "<|START_THINKING|>", *_OWN_THOUGHTS,
)  # fmt: skip
"""Ends of prompts that open a thought of the model."""


@dataclass(frozen=True, slots=True)
class Family:
    """How the model of a tokenizer marks its thoughts and calls.

    Args:
        seen: decodes a turn without special tokens, apart from such marks.
        rewrites: a turn is rewritten for rewards and tools.
        own_thought: the marks of thoughts, also in the messages of its template, where these are not <think>.
    """

    seen: Decode
    rewrites: bool
    own_thought: tuple[str, str] | None

    def text(self, token_ids: list[int]) -> str:
        """The turn as rewards and tools read it."""
        said = self.seen(token_ids)
        return rewritten(said) if self.rewrites else said

    def repeated(self, text: str) -> str:
        """The turn as its template gets it again."""
        if self.own_thought is None:
            return text
        opened, closed = self.own_thought
        return text.replace("<think>", opened).replace("</think>", closed)


def family_of(tokenizer: Any, decode: Decode) -> Family:
    """The family by the marks that a tokenizer has; `decode` leaves out all special tokens."""
    added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    channels = added.keys() >= set(_CHANNELS)
    shown = {added[mark][0] for mark in (*_MARKS, *(_CHANNELED if channels else ())) if mark in added}
    special = {*tokenizer.all_special_ids, *(number for number, special in added.values() if special)}
    hidden, marks = special - shown, special & shown

    def seen(token_ids: list[int]) -> str:
        if marks.isdisjoint(token_ids):
            return decode(token_ids)  # it may be several times as fast
        ids = [one for one in token_ids if one not in hidden]
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    rewrites = channels or any(mark in added for mark in _REWRITTEN)
    own = next((one for one in _OWN_THOUGHTS.items() if one[0] in added), None)
    return Family(seen if marks else decode, rewrites, own)


def rewritten(text: str) -> str:
    """The turn in the forms that rewards and tools read; a text in none of the families' forms is itself."""
    begun = FAMILY_CALLS.search(text)
    if begun is not None and begun[0] in _CHANNELS:
        return _of_channels(text)
    text = _CALL.sub(_of_call, text)
    return _AROUND.sub("", _CLOSINGS.sub("</think>", _OPENINGS.sub("<think>", text)))


def _of_channels(text: str) -> str:
    """Messages of gpt-oss; the first may go on with a thought, and the end may cut any of them."""
    header, *bodies = text.split("<|message|>")
    if not bodies:
        return _HEADER.split(header, maxsplit=1)[0]
    thought, ended, rest = header.rpartition("<|end|>")
    parts, header = ([f"{thought}</think>"], rest) if ended else ([], header)
    for body in bodies:
        end = _ENDS.search(body)
        said, following = (body, "") if end is None else (body[: end.start()], body[end.end() :])
        parts.append(_of_message(header, said, closed=end is not None))
        header = following
    return "".join(parts)


def _of_message(header: str, said: str, *, closed: bool) -> str:
    sent = _SENT.search(header)
    if sent is not None and sent[1] not in ("assistant", "user"):
        return _call(sent[1].removeprefix("functions."), said)
    channel = header.partition("<|channel|>")[2].split()[:1]
    return f"<think>{said}{'</think>' if closed else ''}" if channel == ["analysis"] else said


def _of_call(found: re.Match[str]) -> str:
    body, quote = (found[1], '<|"|>') if found[1] is not None else (found[2], "<escape>")
    called = _CALLED.fullmatch(body)
    return f"<tool_call>{body}</tool_call>" if called is None else _call(called[1], _as_json(called[2], quote))


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


def _as_json(arguments: str, quote: str) -> str:
    """Arguments whose strings stand between marks of their own, and whose keys have none."""
    parts = arguments.split(quote)
    return "".join(
        json.dumps(part, ensure_ascii=False) if number % 2 else _WORD.sub(_quoted, part)
        for number, part in enumerate(parts)
    )


def _quoted(found: re.Match[str]) -> str:
    word = found[0].strip()
    return found[0] if not word or _PLAIN.fullmatch(word) or word.startswith('"') else json.dumps(word)
