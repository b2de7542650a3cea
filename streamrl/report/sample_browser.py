"""`streamrl samples`: samples printed into a pipe, or browsed with keys on a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from streamrl.metrics.samples import Sample
from streamrl.report.sample_view import KINDS, ORDERS, Query, find, read_words, rendered, samples_of

KEYS = "n next  p previous  space down  b up  s sort  r reverse  k kind  / search  q quit"
LEGEND = "token colors, policy against actor: green likelier now, red less likely"


def browse(words: Sequence[str]) -> int:
    """The command. Raises ConfigError: no such run, option or sample."""
    run_dir, query, num = read_words(words)
    samples = samples_of(run_dir)
    found = find(samples, query)
    if sys.stdin.isatty() and sys.stdout.isatty():
        with keys_at_once() as read_keys:
            Browser(samples, query).run(Console(), read_keys)
        return 0
    shown = found[:num] if num else found
    for one in shown:
        print(rendered(one).plain)
    if len(shown) < len(found):
        print(f"{len(shown)} of {len(found)} samples; -n 0 prints all")
    return 0


class Browser:
    """One sample on the screen; `press` moves on."""

    def __init__(self, samples: Sequence[Sample], query: Query) -> None:
        self._samples, self.query = samples, query
        self.found = query.of(samples)
        self.at = 0
        self.top = 0  # first line of the sample that is shown
        self.note = ""
        self.typing: str | None = None  # the word that is being typed after /

    def press(self, key: str) -> bool:
        """Do what the key asks for; False ends."""
        self.note = ""
        if key in ("\x03", "\x04", ""):
            return False
        if self.typing is not None:
            self._type(key)
            return True
        match key:
            case "q":
                return False
            case "n" | "\x1b[C" | "\r":
                self._go(self.at + 1)
            case "p" | "\x1b[D":
                self._go(self.at - 1)
            case " " | "\x1b[B":
                self.top += 10
            case "b" | "\x1b[A":
                self.top = max(0, self.top - 10)
            case "s":
                orders = list(ORDERS)
                self._ask(sort=orders[(orders.index(self.query.sort) + 1) % len(orders)])
            case "r":
                self._ask(reverse=not self.query.reverse)
            case "k":
                kinds = [None, *KINDS]
                self._ask(kind=kinds[(kinds.index(self.query.kind) + 1) % len(kinds)])
            case "/":
                self.typing = ""
        return True

    def screen(self, console: Console) -> list[Text]:
        """Lines for the whole height of the terminal."""
        width, height = console.size
        lines = list(rendered(self.found[self.at]).wrap(console, width))
        room = max(1, height - 3)
        self.top = min(self.top, max(0, len(lines) - room))
        shown = lines[self.top : self.top + room]
        more = len(lines) - self.top - len(shown)
        order = f"by {self.query.sort}{', reversed' if self.query.reverse else ''}"
        status = f"{self.at + 1} of {len(self.found)}  {order}  {self.query}{f'  {more} more lines' if more else ''}"
        bottom = f"/{self.typing}" if self.typing is not None else self.note or LEGEND
        footer = [Text(status, style="reverse"), Text(bottom, style="dim"), Text(KEYS, style="dim")]
        for line in footer:
            line.truncate(width)
        return [*shown, *[Text()] * (room - len(shown)), *footer]

    def run(self, console: Console, read_keys: Callable[[], str]) -> None:
        """Run until a key ends it; the terminal is as it was afterwards."""
        with console.screen():
            while True:
                console.clear()
                console.print(Text("\n").join(self.screen(console)), end="", soft_wrap=True)
                if not all(self.press(key) for key in split_keys(read_keys())):
                    return

    def _go(self, place: int) -> None:
        self.note = "" if 0 <= place < len(self.found) else "there are no more"
        self.at, self.top = min(max(0, place), len(self.found) - 1), 0

    def _ask(self, **changes: object) -> None:
        """Change the question, if it has an answer."""
        asked = Query(**{name: getattr(self.query, name) for name in Query.__slots__} | changes)
        found = asked.of(self._samples)
        if not found:
            self.note = f"no sample: {asked}"
            return
        self.query, self.found, self.at, self.top = asked, found, 0, 0

    def _type(self, key: str) -> None:
        assert self.typing is not None
        if key in ("\r", "\n"):
            word, self.typing = self.typing, None
            self._ask(search=word)
        elif key == "\x1b":
            self.typing = None
        elif key in ("\x7f", "\b"):
            self.typing = self.typing[:-1]
        elif key.isprintable():
            self.typing += key


def split_keys(typed: str) -> list[str]:
    """Keys that came at once; an arrow is three characters, and the end of input one empty key."""
    return re.findall(r"\x1b\[[A-D]|.", typed, re.DOTALL) or [""]


@contextmanager
def keys_at_once() -> Iterator[Callable[[], str]]:
    """Inside, keys are not echoed and arrive as they are typed; gives what reads them, '' at the end of input."""
    import termios
    import tty

    terminal = sys.stdin.fileno()

    def read() -> str:
        try:
            return os.read(terminal, 16).decode(errors="ignore")
        except KeyboardInterrupt:
            return "\x03"

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)  # keeps what was typed already
        yield read
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
