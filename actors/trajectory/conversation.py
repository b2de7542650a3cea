"""The model's next input: the tokens that it read and sampled with more after them, or a context of its own.

A chat template may render earlier turns differently from what was generated. Many leave out the thinking of earlier
answers as soon as the user speaks again. What it makes of the whole conversation decides:

    the template repeats what was read and said      the sampled tokens stay, and only what follows is tokenized
    it does not, differences of white space aside    the whole is tokenized, and another sequence begins

An environment may give the whole next input itself (`Step.context`); the same rule applies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from actors.render import Renderer, SharedPrompts, Tools
from envs.thoughts import heard
from streamrl.environment import ChatMessage, InputText, Step

log = logging.getLogger("streamrl.actor")

TEMPLATE, ENVIRONMENT = "The chat template", "The environment"
REWRITES = (
    "%s rewrites earlier turns, so a trajectory may consist of several sequences; every sampled token is trained once, "
    "in the context that it was sampled in.%s"
)
KEEP = " Templates that leave out earlier thinking do so; env.history=append keeps the turns as they were sampled."
_warned: set[str] = set()
"""What was said of rewritten histories: once a process is enough."""


class Conversation:
    """The input of the next turn, as text and ids.

    Args:
        append: keep every turn as it was sampled, whatever the chat template makes of earlier ones.
        prompts: those that other episodes of the same group have rendered.
    """

    def __init__(self, renderer: Renderer, *, append: bool = False, prompts: SharedPrompts | None = None) -> None:
        self.ids: list[int] = []
        self._renderer, self._append, self._prompts = renderer, append, prompts or SharedPrompts(renderer)
        self._tools: Tools = ()
        self._messages: list[ChatMessage] | None = None  # None if not all of it came as messages
        self._said = ""
        self._before = self._after = ""  # together the text of what was read and said
        self._last_token = -1  # that the model sampled in its last turn; -1, which is no token's id, if there was none

    def open(self, opening: Sequence[ChatMessage] | InputText, tools: Tools = ()) -> None:
        ids, self._before = self._prompts.render(opening, tools)
        self.ids, self._tools = list(ids), tools
        self._messages = None if isinstance(opening, InputText) else list(opening)

    @property
    def text(self) -> str:
        """The whole conversation as the model saw it; its own words without special tokens."""
        return self._before + self._after

    def hear(self, token_ids: Sequence[int]) -> str:
        """A turn of the model; returns its text, which says so if it continues a thought."""
        self._said = self._renderer.text(token_ids)
        heard_text = heard(self._said, self._after or self._before)
        self._after += self._renderer.seen(token_ids)
        self.ids = [*self.ids, *token_ids]
        self._last_token = token_ids[-1] if token_ids else -1
        return heard_text

    def answer(self, step: Step) -> None:
        """Add the environment's answer before the next turn. Raises TaskError: see `Renderer.more_text`."""
        if step.context is not None:
            self._messages = None if isinstance(step.context, InputText) else list(step.context)
            self.read(self._renderer.input_text(step.context, self._tools), ENVIRONMENT)
        elif step.text is not None:
            self._messages = None
            self._follow(step.text)
        elif self._append or self._messages is None or not self._renderer.chat:
            self._follow(self._renderer.more_text(step.messages, self._tools))
        else:
            self._messages += [ChatMessage("assistant", self._said), *step.messages]
            self.read(self._renderer.input_text(self._messages, self._tools), TEMPLATE)

    def read(self, text: str, author: str) -> None:
        """The whole input of the next turn is this text; it continues the present one if it begins with it."""
        rest = rest_after(text, self.text)
        as_it_is = self._messages is None or not rest  # else it may be more of what the model had ended
        if rest is not None and (as_it_is or self._renderer.may_follow(rest, last_token=self._last_token)):
            self._follow(rest)
            return
        self.begin(text, self._renderer.encode(text))
        note_rewriting(author)

    def begin(self, text: str, ids: list[int]) -> None:
        """The model reads this now, in place of all before."""
        self.ids, self._before, self._after, self._last_token = ids, text, "", -1

    def _follow(self, text: str) -> None:
        self.ids = [*self.ids, *self._renderer.follow(text, last_token=self._last_token)]
        self._after += text
        self._last_token = -1


def note_rewriting(author: str) -> None:
    """Say once who rewrites histories."""
    if author not in _warned:
        _warned.add(author)
        log.info(REWRITES, author, KEEP if author == TEMPLATE else "")


def rest_after(text: str, beginning: str) -> str | None:
    """The part of `text` after `beginning`, differences of white space aside; None if it begins otherwise."""
    if text.startswith(beginning):
        return text[len(beginning) :]
    wanted = "".join(beginning.split())
    left, end = len(wanted), 0
    if not "".join(text.split()).startswith(wanted):
        return None
    for word in re.finditer(r"\S+", text):
        if left <= 0:
            break
        end = min(word.start() + left, word.end())
        left -= word.end() - word.start()
    # White space at the end of what was said is there already.
    for space in beginning[len(beginning.rstrip()) :]:
        if text[end : end + 1] != space:
            break
        end += 1
    return text[end:]
