"""The texts of a trajectory's sequences: what an input that came as text continues, so that its tokens stay.

A program sends the whole conversation with every call. The text of the call is compared with that of every sequence, as
it stood after each of its turns: the tokens up to the longest beginning are those that were read and sampled, and only
what follows is tokenized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actors.render import Renderer
from actors.trajectory.conversation import rest_after
from actors.trajectory.transcript import RecordedSequence


@dataclass(slots=True)
class _Text:
    whole: str
    ends: list[int] = field(default_factory=list)  # characters up to the end of each turn; -1: not known any more


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence as it stood at a moment: it only grows, so that a thread may read it up to here."""

    sequence: RecordedSequence
    whole: str
    num_ids: int
    points: tuple[tuple[int, int], ...]  # (characters, ids) up to the end of each turn

    def continued(self, text: str) -> tuple[int, str] | None:
        """The ids that this text repeats, and the rest of the text: up to the latest turn that it has whole."""
        rest = rest_after(text, self.whole)
        if rest is not None:
            return self.num_ids, rest
        for end, num_ids in reversed(self.points):
            if end > 0 and text.startswith(self.whole[:end]):
                return num_ids, text[end:]
        return None


class Texts:
    """Texts by sequence, as the model saw them; its own words without special tokens."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._texts: dict[RecordedSequence, _Text] = {}

    def known(self) -> list[Known]:
        """Every sequence, as it stands now."""
        return [
            Known(sequence, text.whole, len(sequence.ids), tuple(
                (end, sequence.num_prompt + turn.end) for end, turn in zip(text.ends, sequence.turns, strict=True)
            ))
            for sequence, text in self._texts.items()
        ]

    def hear(self, sequence: RecordedSequence, text: str, token_ids: Sequence[int]) -> None:
        """The model read this text and said these tokens, now the last turn of the sequence."""
        known = self._texts.setdefault(sequence, _Text(""))
        if not text.startswith(known.whole):  # other white space: places of earlier turns are not those in this text
            known.ends = [-1] * len(known.ends)
        known.whole = text + self._renderer.text(token_ids)
        known.ends.append(len(known.whole))


def continued(text: str, known: Iterable[Known]) -> tuple[list[int], str]:
    """The ids of the sequence that an input continues the longest, and the text after them; none if it continues none.
    """
    found = [(one, *point) for one in known if (point := one.continued(text)) is not None]
    if not found:
        return [], text
    one, num_ids, rest = max(found, key=lambda point: point[1])
    return one.sequence.ids[:num_ids], rest
