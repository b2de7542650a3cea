"""Stop strings: finds the first token after which the new text contains one.

Tokens and text do not line up (a token may hold half a character, a stop string may span tokens, some decoders drop a
leading space), so the tail is decoded again with every token and only what it adds is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"  # what decoders show for bytes that are not yet a whole character
_WINDOW_TOKENS = 16
_OVERLAP_TOKENS = 6


def decoder(tokenizer: Any) -> Decode:
    """The tokenizer's plain decode, special tokens shown, so that a stop string may be one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(list(ids), skip_special_tokens=False)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopMatcher:
    """Fed one token at a time; `feed` is True at the first token after which the text contains a stop string."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._reach = max(len(text) for text in stop) - 1  # characters of the past that a match can begin in
        self._ids: list[int] = []
        self._first = 0  # the window is ids[first:]
        self._seen = ""  # text of the window so far, unfinished characters left out
        self._past = ""  # the last `reach` characters of all text already searched

    def feed(self, token: int) -> bool:
        self._ids.append(token)
        window = self._decode(self._ids[self._first :])
        if not window.startswith(self._seen):
            # This decoder rewrites earlier text: fall back to the whole of it, searched from the start.
            self._first, self._seen, self._past = 0, "", ""
            window = self._decode(self._ids)
        fresh = window[len(self._seen) :]
        text = self._past + fresh
        if any(stop in text for stop in self._stop):
            return True
        settled = fresh.rstrip(_BROKEN)
        self._seen += settled
        self._past = (self._past + settled)[-self._reach :] if self._reach else ""
        if len(self._ids) - self._first >= _WINDOW_TOKENS:
            self._slide()
        return False

    def _slide(self) -> None:
        """Forget the front of the window, unless that would cut a character in two at either end."""
        first = len(self._ids) - _OVERLAP_TOKENS
        seen = self._decode(self._ids[first:])
        if seen and _BROKEN not in seen:
            self._first, self._seen = first, seen
