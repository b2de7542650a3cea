"""rl4llm's `BaseMDPEnv` with `_run_interaction_loop(env_state, llm, sampling_params)`, and what such files import.

The loop is plain code over a batch of conversations. Here each episode is a batch of one, in a thread of its own, and
`llm.generate` is answered by the actor's engine. What the loop adds to `messages` decides nothing about tokens; the
rewards of the file are computed from them when the loop is over.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from envs.adapters.rl2 import SAMPLING_PARAMS
from envs.adapters.rollouts import BlockingClient, in_own_thread
from envs.data.chat_template import rendered
from envs.data.shapes import RecordShape
from envs.reward_values import as_step
from streamrl.environment import ChatMessage as OurMessage
from streamrl.environment import GenerationClient, Record, RewardFunction, Step
from streamrl.errors import EpisodeFullError, TaskError


@dataclass
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.fields}

    def model_copy(self, **_: Any) -> ChatMessage:
        return ChatMessage(self.role, self.content, self.fields)


@dataclass
class SampleState:
    """One conversation of a batch."""

    messages: list[ChatMessage]
    ground_truth: Any
    init_msg_size: int
    current_step: int = 0
    done: bool = False
    id: str = field(default_factory=lambda: uuid4().hex)


@dataclass
class EnvState:
    """A batch of conversations; here of one."""

    sample_states: list[SampleState]


class BaseRewardFunction:
    """The base of rewards: a name, and `__call__(messages, ground_truth, **kwargs)`."""

    def __init__(self, name: str) -> None:
        self.name = name


class BaseMDPEnv:
    """The base of environments: holds what the loop reads. Data, batches and rewards are not its business here."""

    def __init__(
        self, dataset: Any = None, tokenizer: Any = None, reward_functions: Sequence[Any] = (), batch_size: int = 1,
        group_size: int = 1, max_steps: int = 1, tool_schemas: Sequence[Mapping[str, Any]] | None = None, **_: Any,
    ) -> None:
        self.tokenizer, self.reward_functions = tokenizer, list(reward_functions)
        self.batch_size, self.group_size, self.max_steps = batch_size, group_size, max_steps
        self.tool_schemas = tool_schemas
        self.rank, self.world_size = 0, 1
        self.logger = logging.getLogger("streamrl.actor.environment")

    def _convert_to_batch_prompts(self, env_state: EnvState) -> list[str]:
        """Each conversation through the chat template; one that ends with the model's words is to be continued."""
        prompts = []
        for state in env_state.sample_states:
            messages: list[dict[str, Any]] = []
            for message in state.messages:
                if messages and message.role == messages[-1]["role"] == "assistant":
                    messages[-1]["content"] += message.content
                else:
                    messages.append(message.model_dump())
            begun = bool(messages) and messages[-1]["role"] == "assistant"
            prompts.append(rendered(
                self.tokenizer, messages, self.tool_schemas or (), add_generation_prompt=not begun,
                continue_final_message=begun,
            ))
        return prompts


class InferenceClient:
    """`llm` of a loop: texts in, a dict with a text for each out."""

    def __init__(self, client: BlockingClient) -> None:
        self._client = client

    def generate(
        self, prompts: str | Sequence[str], sampling_params: Mapping[str, Any] | None = None, **_: Any
    ) -> list[dict[str, Any]]:
        known = {key: value for key, value in (sampling_params or {}).items() if key in SAMPLING_PARAMS}
        texts = [prompts] if isinstance(prompts, str) else prompts
        return [{"text": self._client.generate(one, **known).text} for one in texts]


class InteractionLoopEnv:
    """Plays a user's subclass of `BaseMDPEnv`.

    Args:
        make: its class, called with what the base takes.
        reward: scores the conversation that the loop leaves.
        name: file and class, for messages.
    """

    def __init__(
        self, make: Callable[..., Any], options: Mapping[str, Any], reward: RewardFunction, name: str,
        shape: RecordShape,
    ) -> None:
        self._make, self._options, self._reward, self._name, self._shape = make, options, reward, name, shape

    def reset(self, record: Record) -> Sequence[OurMessage]:
        """The record's prompt, for which a tiny model is made; the loop itself decides what the model reads."""
        return self._shape.messages(record)

    async def rollout(self, record: Record, client: GenerationClient) -> Step:
        opening = [ChatMessage(one.role, one.content, one.fields) for one in self._shape.messages(record)]
        num_opening = len(opening)
        state = SampleState(opening, self._shape.answer(record), num_opening)
        blocking = BlockingClient(client)
        env = self._make(
            dataset=None, tokenizer=client.tokenizer, reward_functions=(), batch_size=1, group_size=1,
            max_steps=client.num_turns_left, **self._options,
        )
        loop = env._run_interaction_loop
        cut = False
        try:
            found = await in_own_thread(
                lambda: loop(EnvState([state]), InferenceClient(blocking), dict(client.sampling)), blocking
            )
            (state,) = found.sample_states
        except EpisodeFullError:
            cut = True
        # The file's rewards are plain code, and the loop here serves every episode.
        return await asyncio.to_thread(self._scored, record, state, num_opening, cut)

    def _scored(self, record: Record, state: SampleState, num_opening: int, cut: bool) -> Step:
        said = [OurMessage(one.role, one.content, one.fields) for one in state.messages]
        while cut and len(said) > num_opening and said[-1].role != "assistant":
            said.pop()  # what the loop added before the call that had no room
        if len(said) <= num_opening or said[-1].role != "assistant":
            raise TaskError(
                f"{self._name}: the loop left a conversation that ends with a message of {said[-1].role}: the last one "
                "must be what the model said, with the role assistant."
            )
        step = as_step(self._reward(copy.deepcopy(dict(record)), said[-1].content, said[:-1]), self._name)
        return Step(step.reward, score=step.score, parts=step.parts, truncated=cut)
