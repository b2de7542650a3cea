"""The texts of a trajectory's sequences: what an input that came as text continues, so that its tokens stay.

A program sends the whole conversation with every call. The text of the call is compared with that of every sequence, as
it stood after each of its turns: the tokens up to the longest beginning are those that were read and sampled, and only
what follows is tokenized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actors.render import Renderer
from actors.trajectory.conversation import rest_after
from actors.trajectory.transcript import RecordedSequence


@dataclass(slots=True)
class _Text:
    whole: str
    ends: list[int] = field(default_factory=list)  # characters up to the end of each turn; -1: not known any more


class Texts:
    """Texts by sequence, as the model saw them; its own words without special tokens."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._texts: dict[RecordedSequence, _Text] = {}

    def ids_for(self, text: str) -> list[int] | None:
        """The ids of an input with those of the sequence that it continues; None if it continues none."""
        points = [point for sequence, known in self._texts.items() for point in _points(text, sequence, known)]
        if not points:
            return None
        ids, rest = max(points, key=lambda point: len(point[0]))
        return [*ids, *self._renderer.follow(rest, last_token=ids[-1])]

    def hear(self, sequence: RecordedSequence, text: str, token_ids: Sequence[int]) -> None:
        """The model read this text and said these tokens, now the last turn of the sequence."""
        known = self._texts.setdefault(sequence, _Text(""))
        if not text.startswith(known.whole):  # other white space: places of earlier turns are not those in this text
            known.ends = [-1] * len(known.ends)
        known.whole = text + self._renderer.text(token_ids)
        known.ends.append(len(known.whole))


def _points(text: str, sequence: RecordedSequence, known: _Text) -> Iterator[tuple[list[int], str]]:
    """The ids of the sequence as far as this text repeats it, and the rest of the text; the longest alone."""
    rest = rest_after(text, known.whole)
    if rest is not None:
        yield sequence.ids, rest
        return
    for turn, end in zip(reversed(sequence.turns), reversed(known.ends), strict=True):
        if end > 0 and text.startswith(known.whole[:end]):
            yield sequence.ids[: sequence.num_prompt + turn.end], text[end:]
            return
