r"""Find the answer in a completion: the last \boxed{...}, the last <answer> tag, the last code block."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPENED, _CLOSED = ANSWER_TAGS[2:]
_BOXED = "\\boxed{"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_FINAL = "####"
_FENCE, _PYTHON_FENCE = "```", "```python"


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{`, with balanced braces, stripped; None if there is none or it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def last_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`, stripped; None if there is none."""
    end = text.rfind(_CLOSED)
    while end >= 0:  # not a regular expression: its time is quadratic in tags that are never closed
        before = text.rfind(_CLOSED, 0, end)
        start = text.find(_OPENED, max(before, 0), end)
        if start >= 0:
            return text[start + len(_OPENED) : end].strip()
        end = before
    return None


def last_number(text: str) -> str | None:
    """The last number in a text, without the commas between thousands."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def first_found(text: str, *finders: Callable[[str], str | None]) -> str | None:
    """What the first finder gives that finds anything."""
    return next((found for find in finders if (found := find(text)) is not None), None)


def stated_answer(text: str) -> str:
    """The answer that a completion gives, for comparing completions: in a box, in a tag, or all of it."""
    return first_found(text, last_boxed, last_answer_tag) or text.strip()


def final_answer(text: str) -> str:
    """The answer in a record's own answer: after the last `####`, as GSM8K writes it, in a box, or all of it."""
    if _FINAL in text:
        return text.rsplit(_FINAL, 1)[1].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def has_format(text: str, tags: Sequence[str]) -> bool:
    """Each tag stands in `text` exactly once, in this order, and nothing follows the last one."""
    places = [text.find(tag) for tag in tags]
    once = all(text.count(tag) == 1 for tag in tags)
    return once and places == sorted(places) and (not tags or text.endswith(tags[-1]))


def last_code_block(text: str) -> tuple[str, bool]:
    """A program and whether it stood in a fence of Python.

    The text after the last ```python up to the next fence. Without one, the text before the first fence: it may still
    be right, but it was not given in the form that was asked for.
    """
    start = text.rfind(_PYTHON_FENCE)
    if start < 0:
        return text.split(_FENCE, 1)[0], False
    return text[start + len(_PYTHON_FENCE) :].split(_FENCE, 1)[0], True
