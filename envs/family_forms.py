"""Turns that a family of models writes in tokens of its own, rewritten as <think>...</think>, <tool_call> and text.

    gpt-oss         <|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>A
                    <|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "3+4"}
    Gemma 4         <|channel>thought\\nT<channel|>A<|tool_call>call:calculator{expression:<|"|>3+4<|"|>}<tool_call|>
    FunctionGemma   <start_function_call>call:calculator{expression:<escape>3+4<escape>}<end_function_call>
    Mistral         [THINK]T[/THINK]A, and [TOOL_CALLS]calculator[ARGS]{"expression": "3+4"}, which is read as it is

Most of these are special tokens, which a plain decoding leaves out: what is thought, called and said runs together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

Decode = Callable[[list[int]], str]
_CHANNELS = ("<|channel|>", "<|message|>")
_FAMILIES: tuple[tuple[Collection[str], Collection[str]], ...] = (
    # Where a tokenizer has all of the first, the second are shown.
    (
        _CHANNELS,
        (
            *_CHANNELS,
            "<|start|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
    ),
    (
        ("<|channel>", "<channel|>"),
        ("<|channel>", "<channel|>"),
    ),
    (
        ("<|tool_call>", "<tool_call|>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    (
        ("<start_function_call>",),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    (
        ("[THINK]", "[/THINK]"),
        ("[THINK]", "[/THINK]"),
    ),
    (
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
)
_OPENINGS = re.compile(r"<\|channel>\w*\n?|\[THINK\]")
_CLOSINGS = re.compile(r"<channel\|>|\[/THINK\]")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)")
_HEADER = re.compile(r"<\|(?:start|channel|constrain|end)\|>")
_SENT = re.compile(r"\bto=([\w.-]+)")
_CALL = re.compile(
    r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)|<start_function_call>(.*?)(?:<end_function_call>|\Z)", re.DOTALL
)
_CALLED = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_QUOTE = re.compile(r'<\|"\|>|<escape>')
_WORD = re.compile(r"[^{}\[\],:]+")
_PLAIN = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
OPENED = ("<think>", "<|channel>thought", "[THINK]", "<|channel|>analysis<|message|>")
"""Ends of prompts that open a thought of the model."""


@dataclass(frozen=True, slots=True)
class Family:
    """How the model of a tokenizer marks its thoughts and calls.

    Args:
        seen: decodes a turn without special tokens, apart from such marks.
        rewrites: a turn is rewritten for rewards and tools.
        brackets: thoughts stand in [THINK] and [/THINK], also in the messages of its template.
    """

    seen: Decode
    rewrites: bool
    brackets: bool

    def text(self, token_ids: list[int]) -> str:
        """The turn as rewards and tools read it."""
        said = self.seen(token_ids)
        return rewritten(said) if self.rewrites else said

    def repeated(self, text: str) -> str:
        """The turn as its template gets it again."""
        if not self.brackets:
            return text
        return text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")


def family_of(tokenizer: Any, decode: Decode) -> Family:
    """The family by the marks that a tokenizer has; `decode` leaves out all special tokens."""
    added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    found = [(needed, marks) for needed, marks in _FAMILIES if added.keys() >= set(needed)]
    shown = {added[mark][0] for _, marks in found for mark in marks if mark in added}
    special = {*tokenizer.all_special_ids, *(number for number, special in added.values() if special)}
    hidden = special - shown

    def seen(token_ids: list[int]) -> str:
        ids = [one for one in token_ids if one not in hidden]
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    rewrites = any("[ARGS]" not in needed for needed, _ in found)
    return Family(seen if shown & special else decode, rewrites, "[THINK]" in added)


def rewritten(text: str) -> str:
    """The turn in the forms that rewards and tools read; a text in none of the families' forms is itself."""
    if "<|message|>" in text or "<|channel|>" in text:
        text = _of_channels(text)
    text = _CALL.sub(_of_call, text)
    return _CLOSINGS.sub("</think>", _OPENINGS.sub("<think>", text))


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
    body = found[1] if found[1] is not None else found[2]
    called = _CALLED.fullmatch(body)
    return f"<tool_call>{body}</tool_call>" if called is None else _call(called[1], _as_json(called[2]))


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


def _as_json(arguments: str) -> str:
    """Arguments whose strings stand between marks of their own, and whose keys have none."""
    parts = _QUOTE.split(arguments)
    return "".join(
        json.dumps(part, ensure_ascii=False) if number % 2 else _WORD.sub(_quoted, part)
        for number, part in enumerate(parts)
    )


def _quoted(found: re.Match[str]) -> str:
    word = found[0].strip()
    return found[0] if not word or _PLAIN.fullmatch(word) or word.startswith('"') else json.dumps(word)
