"""A trajectory while it grows: exactly the tokens that the engine read and sampled.

If what the model read in a turn begins with all of the present sequence, that sequence goes on. If not, another one of
the same trajectory begins, whose prompt is what was read.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.engines.base import Generation
from streamrl.messages import Member, MemberStatus, SequenceStart, Span, Turn, VersionRef
from streamrl.messages.codec import pack_ids, pack_logprobs


class Transcript:
    """Positions count tokens after the first prompt, through all sequences.

    Attributes:
        turns: those of the model that have tokens.
        num_tokens: prompts and responses of all sequences.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._prompt_ids: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[tuple[int, int]] = []
        self._versions: list[Span] = []
        self._sequences: list[SequenceStart] = []
        self._present: list[int] = []  # all ids of the present sequence
        self.num_tokens = 0
        self._pending_reward = 0.0  # of turns without tokens, while there is no turn to add it to

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The first sequence has this prompt, whatever the model reads in the first turn that has tokens."""
        self._prompt_ids = self._present = list(prompt_ids)
        self.num_tokens = len(self._present)

    @property
    def first_version(self) -> VersionRef | None:
        """The version that sampled the first token; None before it."""
        first = next(iter(self._versions), None)
        return None if first is None else VersionRef(first.learner_epoch, first.version)

    def num_tokens_with(self, read: Sequence[int]) -> int:
        """Prompts and responses of all sequences, if the model reads these ids next."""
        return self.num_tokens + len(read) - (len(self._present) if self.goes_on(read) else 0)

    def add_turn(self, read: Sequence[int], generation: Generation) -> None:
        """A turn of the model after these ids; a turn without tokens leaves no trace."""
        if not generation.token_ids:
            return
        num_tokens = self.num_tokens_with(read) + len(generation.token_ids)
        self._add_input(read)
        self.num_tokens = num_tokens
        start = len(self._token_ids)
        end = start + len(generation.token_ids)
        self._token_ids += generation.token_ids
        self._logprobs += generation.logprobs
        self._mask.append((start, end))
        self.turns.append(Turn(start, end, self._pending_reward))
        self._pending_reward = 0.0
        for span in generation.spans:
            ref = span.ref
            self._versions.append(Span(ref.learner_epoch, ref.version, start + span.start, start + span.end))
        self._present = [*read, *generation.token_ids]

    def pay(self, reward: float, turn: int = -1) -> None:
        """Add to the reward of a turn, the last one unless said; without any it goes to the first one that comes."""
        if not self.turns:
            self._pending_reward += reward
            return
        paid = self.turns[turn]
        self.turns[turn] = Turn(paid.start, paid.end, paid.reward + reward)

    def pay_only(self, reward: float) -> None:
        """The whole reward on the last turn, in place of what the turns earned."""
        *earlier, last = self.turns
        self.turns = [*(Turn(turn.start, turn.end, 0.0) for turn in earlier), Turn(last.start, last.end, reward)]

    def member(self, index: int, status: MemberStatus, scores: dict[str, float], finish: str) -> Member:
        return Member(
            index=index, status=status, prompt_ids=pack_ids(self._prompt_ids), token_ids=pack_ids(self._token_ids),
            logprobs=pack_logprobs(self._logprobs), mask=tuple(self._mask), versions=tuple(self._versions),
            turns=tuple(self.turns), reward=float(sum(turn.reward for turn in self.turns)), scores=scores,
            finish=finish, sequences=tuple(self._sequences),
        )

    def goes_on(self, read: Sequence[int]) -> bool:
        """Whether this input begins with all of the present sequence."""
        return list(read[: len(self._present)]) == self._present

    def _add_input(self, read: Sequence[int]) -> None:
        """Add the input of a turn: a prompt, or the tokens after the last turn."""
        if not self._present:
            self.begin(read)
        elif self.goes_on(read):
            more = read[len(self._present) :]
            self._token_ids += more
            self._logprobs += [0.0] * len(more)
        elif not self.turns:  # what was read before any word of the model is no part of a trajectory
            self.begin(read)
        else:
            self._sequences.append(SequenceStart(len(self._token_ids), pack_ids(list(read))))
