"""A trajectory while it grows: exactly the tokens that the engine read and sampled, as a set of sequences.

If what the model read in a turn begins with all of a sequence, the longest such sequence goes on. If not, another one
of the same trajectory begins, whose prompt is what was read. So an agent and its subagent, which speak in turns, have
one sequence each, and a fork of a conversation reads again what it shares with the other branch: every sampled token is
an action of one sequence alone. A sequence belongs to the agent that its calls name, and another agent begins its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.engines.base import Generation, VersionSpan
from streamrl.errors import TaskError
from streamrl.messages import Member, MemberStatus, SequenceStart, Span, Turn, VersionRef
from streamrl.messages.codec import pack_ids, pack_logprobs
from streamrl.messages.validate import pack_sets


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """Tokens start..end of its sequence, both counted after the sequence's prompt."""

    start: int
    end: int
    spans: list[VersionSpan]  # they count from `start`
    reward: float = 0.0
    finish: str = ""
    score: float | None = None  # None is the reward


@dataclass(slots=True, eq=False)
class RecordedSequence:
    ids: list[int]  # the prompt and all that followed
    num_prompt: int
    logprobs: list[float] = field(default_factory=list)  # of all that followed, 0.0 for what was only read
    turns: list[RecordedTurn] = field(default_factory=list)
    sets: list[np.ndarray] = field(default_factory=list)  # the ids that each sampled token was drawn from, if recorded
    agent: str = ""

    def goes_on(self, read: Sequence[int]) -> bool:
        """Whether this input begins with all of the sequence."""
        return len(read) >= len(self.ids) and list(read[: len(self.ids)]) == self.ids


class Transcript:
    """The sequences of a trajectory in the order in which they began; on the wire they lie end to end.

    Attributes:
        turns: those of the model that have tokens, in the order in which they ended.
        num_tokens: prompts and responses of all sequences.
    """

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self.num_tokens = 0
        self._sequences: list[RecordedSequence] = []
        self._pending_reward = 0.0  # of turns without tokens, while there is no turn to add it to

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The first sequence has this prompt, whatever the model reads in the first turn that has tokens."""
        self._sequences = [RecordedSequence(list(prompt_ids), len(prompt_ids))]
        self.num_tokens = len(prompt_ids)

    @property
    def first_version(self) -> VersionRef | None:
        """The version that sampled the first token; None before it."""
        return self.turns[0].spans[0].ref if self.turns and self.turns[0].spans else None

    def num_tokens_with(self, read: Sequence[int], agent: str = "") -> int:
        """Prompts and responses of all sequences, if this agent's model reads these ids next."""
        present = self.continued(read, agent)
        return self.num_tokens + len(read) - (0 if present is None else len(present.ids))

    def has_room(self, calls: Sequence[tuple[Sequence[int], str, int]], max_tokens: int) -> bool:
        """Tell whether calls that read these ids, for an agent, and say up to so many may all end, in any order.

        Where several begin with all of a sequence, one alone goes on with it.
        """
        total = self.num_tokens + sum(len(read) + num_new for read, _, num_new in calls)
        if total <= max_tokens:
            return True  # whatever they go on with, which takes longer to find
        present = {self.continued(read, agent) for read, agent, _ in calls}
        return total - sum(len(one.ids) for one in present if one is not None) <= max_tokens

    def continued(self, read: Sequence[int], agent: str = "") -> RecordedSequence | None:
        """The longest sequence of this agent with which this input begins."""
        known = (one for one in self._sequences if one.agent == agent and one.goes_on(read))
        return max(known, key=lambda one: len(one.ids), default=None)

    def add_turn(self, read: Sequence[int], generation: Generation, agent: str = "") -> RecordedSequence | None:
        """Add a turn of the model after these ids; returns its sequence. A turn without tokens leaves no trace."""
        if not generation.token_ids:
            return None
        present = self._with_input(read, agent)
        start = len(present.logprobs)
        present.ids += generation.token_ids
        present.logprobs += generation.logprobs
        present.sets += generation.sets or []
        self.num_tokens += len(generation.token_ids)
        turn = RecordedTurn(start, len(present.logprobs), generation.spans, self._pending_reward, generation.finish)
        present.turns.append(turn)
        self.turns.append(turn)
        self._pending_reward = 0.0
        return present

    def pay(self, reward: float, turn: int = -1) -> None:
        """Add to the reward of a turn, the last one unless said; without any it goes to the first one that comes."""
        if not self.turns:
            self._pending_reward += reward
            return
        self.turns[turn].reward += reward

    def pay_outcome(self, reward: float) -> None:
        """Pay the reward of the whole trajectory on the last turn of its last sequence."""
        if not self.turns:
            return self.pay(reward)
        self._sequences[-1].turns[-1].reward += reward

    def pay_agents(self, rewards: Mapping[str, float]) -> None:
        """The reward of each agent, on its own last turn. Raises TaskError for one without a turn."""
        last = {one.agent: one for one in self._sequences if one.turns}
        for agent, reward in rewards.items():
            if agent not in last:
                raise TaskError(
                    f"a reward names the agent {agent!r}, and the turns of this episode are of "
                    f"{', '.join(map(repr, last)) or 'none'}: give the header X-Agent-ID in each call of an agent"
                )
            last[agent].turns[-1].reward += reward

    def pay_only(self, reward: float) -> None:
        """The whole reward as the outcome, in place of what the turns earned."""
        for turn in self.turns:
            turn.reward = 0.0
        self.pay_outcome(reward)

    def trace(self) -> list[dict[str, Any]]:
        """The sequences as plain values; spans and turns count from the end of their sequence's prompt."""
        return [
            {
                "agent": one.agent, "prompt_token_ids": one.ids[: one.num_prompt],
                "token_ids": one.ids[one.num_prompt :], "logprobs": one.logprobs,
                "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in one.turns],
                "versions": [
                    {"start": turn.start + span.start, "end": turn.start + span.end, "version": span.ref.version}
                    for turn in one.turns for span in turn.spans
                ],
            }
            for one in self._sequences
        ]

    def member(self, index: int, status: MemberStatus, scores: dict[str, float], finish: str) -> Member:
        tokens: list[int] = []
        logprobs: list[float] = []
        turns, versions, starts = [], [], []
        for one in self._sequences:
            place = len(tokens)
            starts.append(SequenceStart(place, pack_ids(one.ids[: one.num_prompt])))
            tokens += one.ids[one.num_prompt :]
            logprobs += one.logprobs
            for turn in one.turns:
                start = place + turn.start
                turns.append(Turn(start, place + turn.end, turn.reward, turn.score, turn.finish))
                versions += [
                    Span(span.ref.learner_epoch, span.ref.version, start + span.start, start + span.end)
                    for span in turn.spans
                ]
        return Member(
            index=index, status=status, prompt_ids=starts[0].prompt_ids, token_ids=pack_ids(tokens),
            logprobs=pack_logprobs(logprobs), mask=tuple((turn.start, turn.end) for turn in turns),
            versions=tuple(versions), turns=tuple(turns), reward=float(sum(turn.reward for turn in turns)),
            scores=scores, finish=finish, sequences=tuple(starts[1:]),
            sets=pack_sets([ids for one in self._sequences for ids in one.sets]),
            agents=tuple(one.agent for one in self._sequences) if any(one.agent for one in self._sequences) else (),
        )

    def _with_input(self, read: Sequence[int], agent: str) -> RecordedSequence:
        """The sequence of a turn that reads these ids, with them at its end."""
        present = self.continued(read, agent)
        if present is None:
            if not self.turns:  # what was read before any word of the model is no part of a trajectory
                self._sequences, self.num_tokens = [], 0
            present = RecordedSequence(list(read), len(read), agent=agent)
            self._sequences.append(present)
            self.num_tokens += len(read)
            return present
        more = read[len(present.ids) :]
        present.ids += more
        present.logprobs += [0.0] * len(more)
        self.num_tokens += len(more)
        return present
