"""`step(state, action, extra_info)` and `env_step(sample)` of RL2: environments that work on the model's input as text.

`state` is the text that the model read and `action` what it wrote. What `next_state` adds to the two is encoded alone
and follows the sampled tokens. A next state that does not begin with them begins another sequence of the trajectory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.adapters.rl2 import Sample
from envs.async_compat import call
from envs.data.chat_template import text_with_calls
from envs.data.shapes import RecordShape, tool_schemas
from envs.reward_values import number
from streamrl.environment import ChatMessage, InputText, Record, Step
from streamrl.errors import TaskError

KEYS = "a dict with reward and done, next_state unless it is done, and perhaps score and extra_info"


class TextStepEnv:
    """Plays a user's `step(state, action, extra_info)`.

    Args:
        step: the user's function, plain or async.
        name: file and function, for messages.
        shape: reads the prompt of a record; None if `start` gives the first state.
        start: the user's `reset(extra_info) -> (state, extra_info)`.
    """

    def __init__(
        self, step: Callable[..., Any], name: str, shape: RecordShape | None,
        start: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self._function, self._name, self._shape, self._start = step, name, shape, start
        self._state = ""
        self._extra: Any = {}
        self.tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        """The record's own prompt."""
        assert self._shape is not None, "an environment that starts by itself takes no prompt of a record"
        self.tools = tool_schemas(record)
        self._extra = extra_info(record, self._shape)
        prompt = self._shape.messages(record)
        self._state = "\n".join(map(text_with_calls, prompt))
        return prompt

    def set_input_text(self, text: str) -> None:
        self._state = text

    async def step(self, action: str) -> Step:
        return self._read(await self._answer(action), action, last=False)

    async def last_step(self, action: str) -> Step:
        return self._read(await self._answer(action), action, last=True)

    async def _answer(self, action: str) -> Any:
        return await call(self._function, self._state, action, self._extra)

    def _read(self, answer: Any, action: str, *, last: bool) -> Step:
        """The user's answer as a step. Raises TaskError naming what it lacks."""
        if not isinstance(answer, Mapping):
            raise TaskError(f"{self._name} returned {answer!r:.80} ({type(answer).__name__}): return {KEYS}.")
        lacks = [key for key in ("reward", "done") if key not in answer]
        if lacks:
            found = ", ".join(map(str, answer)) or "nothing"
            raise TaskError(f"{self._name} returned {found} and lacks {' and '.join(lacks)}: return {KEYS}.")
        self._extra = answer.get("extra_info", self._extra)
        done, score = bool(answer["done"]), answer.get("score")
        step = Step(
            reward=number(answer["reward"], f"{self._name}, reward,"), done=done,
            score=None if score is None else number(score, f"{self._name}, score,"),
        )
        if done or last:
            return step
        return self._goes_on(step, answer.get("next_state"), action)

    def _goes_on(self, step: Step, next_state: Any, action: str) -> Step:
        """Add to the step what `next_state` appends to state and action; all of `next_state` if it replaces them."""
        before = self._state + action
        if not isinstance(next_state, str):
            raise TaskError(
                f"{self._name} returned next_state={next_state!r:.80} although it is not done: return "
                "state + action + what the environment says, another text that the model reads next, or done=True."
            )
        self._state = next_state
        if next_state.startswith(before):
            return replace(step, text=next_state[len(before) :])
        return replace(step, context=InputText(next_state))


class StartingTextStepEnv(TextStepEnv):
    """The same where the user's `reset(extra_info)` gives the first state, for records without a prompt."""

    async def reset(self, record: Record) -> InputText:  # type: ignore[override]
        assert self._start is not None
        answer = await call(self._start, copy.deepcopy(dict(record)))
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], str):
            raise TaskError(
                f"{self._name}: reset returned {answer!r:.80}: return the state, a text, and extra_info, as a tuple."
            )
        self._state, self._extra = answer
        return InputText(self._state)


class SampleStepEnv(TextStepEnv):
    """Plays a user's `env_step(sample)`: the same answers, with the record and the texts on one object."""

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        prompt = super().reset(record)
        self._sample = Sample(copy.deepcopy(dict(record)))
        return prompt

    async def _answer(self, action: str) -> Any:
        sample = self._sample
        sample.state_text, sample.action_text, sample.turn = self._state, action, sample.turn + 1
        return await call(self._function, sample)


def extra_info(record: Record, shape: RecordShape) -> dict[str, Any]:
    """A copy for one episode: every field but the prompt, `answer`, and what the record has under `extra_info`."""
    prompt = shape.prompt_field(record)
    extra = record.get("extra_info")
    answer = shape.answer(record)
    found = {key: value for key, value in record.items() if key not in (prompt, "extra_info")}
    found |= {} if answer is None else {"answer": answer}
    return copy.deepcopy({**found, **(extra if isinstance(extra, Mapping) else {})})
