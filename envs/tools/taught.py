"""A comparison of what a chat template teaches a model to write with what is read: calls of tools, and thoughts.

Tells by one message through the template itself, in the text that decoding leaves of it: special tokens are gone there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from envs.data.chat_template import rendered, shows_tools
from envs.family_forms import family_of
from envs.thoughts import spoken
from streamrl.environment import THOUGHTS

UNREAD = (
    "the chat template writes calls of tools as {!r:.120}, which {} does not read: calls of a model that writes so are "
    "taken for text; {}, or give another template with data.chat_template"
)
MERGED = (
    "the chat template has no <think>...</think> around thoughts, it writes {!r:.120}: rewards and environments take "
    "the thought for part of the answer; give another template with data.chat_template, or a reward that takes it away"
)
MARK = "streamrlmark"
ASKED = {"role": "user", "content": "?"}


def unread_call(
    tokenizer: Any, tool: Mapping[str, Any], read: Callable[[str], Iterable[Any]], template: str | None = None
) -> str:
    """A call of this tool as the template writes it, if `read` finds none of its name there; else an empty text.

    Args:
        tool: its JSON schema.
        read: finds calls in a model's text.
        template: in place of the tokenizer's own.
    """
    function = tool.get("function")
    if not isinstance(function, Mapping) or not shows_tools(tokenizer, [ASKED], template):
        return ""  # no tool, or described in a form that is read
    name, takes, said = str(function.get("name")), function.get("parameters"), ""
    properties = takes.get("properties") if isinstance(takes, Mapping) else None
    argument = next(iter(properties), "value") if isinstance(properties, Mapping) else "value"
    for number in ("call00001", f"functions.{name}:0"):  # Kimi's template writes the id in place of the name
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": {argument: MARK}}}
        text = _said(tokenizer, {"content": "", "tool_calls": [call]}, [tool], template)
        if name not in text or MARK not in text:
            return ""  # none is written
        try:
            if any(getattr(one, "name", None) == name for one in read(spoken(text))):
                return ""
        except Exception:  # a user's own parser raises what it likes
            return ""
        said = said or text
    return said


def merged_thought(tokenizer: Any, template: str | None = None) -> str:
    """An answer with its thought as the template writes it, if the thought is read as part of the answer."""
    text = _said(tokenizer, {"content": "42", **dict.fromkeys(THOUGHTS, MARK)}, [], template)
    return text if MARK in spoken(text) and "42" in text else ""


def _said(tokenizer: Any, message: Mapping[str, Any], tools: list[Mapping[str, Any]], template: str | None) -> str:
    """The model's turn that is this message, as its tokens are decoded; an empty text if the template refuses it."""
    own = {} if template is None else {"chat_template": template}
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    try:
        before = rendered(tokenizer, [ASKED], tools, add_generation_prompt=True, **own)
        whole = rendered(tokenizer, [ASKED, {"role": "assistant", **message}], tools, **own)
        ids = tokenizer(whole[len(os.path.commonprefix([before, whole])) :], add_special_tokens=False)["input_ids"]
        return family_of(tokenizer, decode).text(ids)
    except Exception:  # a template raises what it likes
        return ""
