"""The limits of an episode, from the settings that an actor got with its WELCOME."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.engines.base import GenerateRequest
from actors.trajectory.transcript import Transcript
from streamrl.errors import TaskError
from streamrl.messages import Sampling, VersionRef


class PromptTooLongError(TaskError):
    """The rendered prompt leaves no room; the lease goes back with reason TOO_LONG."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Limits of an episode, from the learner's WELCOME."""

    max_prompt_tokens: int
    max_new_tokens: int
    max_turns: int
    max_tokens: int = 1 << 31  # prompts and everything after them
    max_sequence_tokens: int = 1 << 31  # of one input and its answer: what the engine has room for
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    step_timeout_s: float = 30.0
    error_floor: float | None = None  # None: an environment error aborts the member
    truncate_prompts: bool = False  # a prompt that is too long keeps its end
    wants_sets: bool = True  # what is sampled may be trained on
    append_history: bool = False  # earlier turns stay as they were sampled, whatever the chat template makes of them

    def checked_prompt(self, prompt_ids: list[int]) -> list[int]:
        """The prompt, or its end if it may be cut: what asks for the answer stands there. Raises PromptTooLongError."""
        prompt_ids = prompt_ids[-self.max_prompt_tokens :] if self.truncate_prompts else prompt_ids
        num_prompt = len(prompt_ids)
        if num_prompt > self.max_prompt_tokens or num_prompt >= self.max_tokens:
            raise self.too_long(str(num_prompt))
        return prompt_ids

    def too_long(self, count: str) -> PromptTooLongError:
        """The error for a prompt of so many tokens."""
        return PromptTooLongError(
            f"the prompt has {count} tokens, rollout.max_prompt_tokens is {self.max_prompt_tokens} and a whole "
            f"trajectory may have {self.max_tokens}: raise it, or set data.prompt_overflow=truncate_left"
        )

    def room(self, transcript: Transcript, read: Sequence[int], agent: str = "") -> int:
        """New tokens that a turn may have after this input; 0 or less if the trajectory is full."""
        left = self.max_tokens - transcript.num_tokens_with(read, agent)
        return min(self.max_new_tokens, left, self.max_sequence_tokens - len(read))

    def request(
        self, read: Sequence[int], room: int, seed: int, turn: int, sampling: Sampling, stop: tuple[str, ...] = (),
        *, version: VersionRef | None = None,
    ) -> GenerateRequest:
        """One turn; each draws from a stream of its own, turn 0 from the lease's seed itself."""
        return GenerateRequest(
            prompt_ids=read, sampling=sampling, seed=(seed + turn * 0x9E3779B97F4A7C15) % (1 << 64),
            max_new_tokens=room, stop=stop or self.stop, ignore_eos=self.ignore_eos,
            version=version, wants_sets=self.wants_sets,
        )
