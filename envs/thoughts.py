"""A model's thoughts and what it says after them: only that is its answer.

A chat template may end the prompt with <think>, as those of R1's distillates and Qwen3.5 do. The model's own text then
holds no opening; an actor marks it as `streamrl.environment.Continued`, and the opening is taken as given.
"""

from __future__ import annotations

from envs import family_forms
from streamrl.environment import Continued

OPENED, CLOSED = "<think>", "</think>"
TAIL = 16
"""Tokens at the end of a prompt that show whether it opens a thought."""


def heard(text: str, read: str) -> str:
    """The model's text after it read `read`; marked if that left a thought open."""
    return Continued(text) if read.rstrip().endswith(family_forms.OPENED) else text


def whole(completion: str) -> str:
    """The text with the opening of its first thought."""
    given = isinstance(completion, Continued) and not completion.lstrip().startswith(OPENED)
    return OPENED + completion if given else str(completion)


def reopened(text: str) -> str:
    """The text, with an opening of the thought that it closes and the prompt had opened."""
    before, closed, _ = text.partition(CLOSED)
    return f"{OPENED}\n{text}" if closed and OPENED not in before else text


def spoken(completion: str) -> str:
    """The text after the thoughts; nothing of a thought that is never closed."""
    start = spoken_from(completion)
    if start == 0 and isinstance(completion, Continued):
        return ""
    return completion[start:].partition(OPENED)[0]


def spoken_from(text: str) -> int:
    """The place where the text after the last closed thought begins."""
    return text.rfind(CLOSED) + len(CLOSED) if CLOSED in text else 0
