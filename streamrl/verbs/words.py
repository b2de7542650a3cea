"""The words of a command: positions and `--option VALUE`."""

from __future__ import annotations

from streamrl.errors import ControlError


def arguments(words: list[str], usage: str, *names: str) -> list[str]:
    """The words, which must be as many as `names`. Raises ControlError, with the usage."""
    if len(words) != len(names):
        got = " ".join(words) or "nothing"
        raise ControlError(f"expected {' '.join(names)}, got {got}\n\n{usage}")
    return words


def taken(words: list[str], option: str, default: float) -> tuple[list[str], float]:
    """The other words, and the number after `option`. Raises ControlError for one that is no number of seconds."""
    if option not in words:
        return words, default
    at = words.index(option)
    given = words[at + 1] if at + 1 < len(words) else ""
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 86_400.0:
        raise ControlError(f"{option} takes a number of seconds, from 0 to 86400; got {given or 'nothing'}")
    return [*words[:at], *words[at + 2 :]], seconds
