"""`reward.type` or `reward.weights` becomes a reward function for the records of `data.path`.

A reward gets the record, the completion and the conversation before it. `envs.data.shapes` reads a record's answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.async_compat import call, suited
from envs.data.shapes import RecordShape
from envs.reward_values import as_step
from envs.rewards.answers import Boxed, Exact, FreeMath, ThinkAnswerTags
from envs.rewards.code import Code
from envs.rewards.extract import ANSWER_TAGS, has_format
from envs.rewards.services import Judge, RewardModel, reward_model
from envs.thoughts import whole
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record, RewardFunction, Step
from streamrl.errors import ConfigError, describe
from streamrl.extension import resolve


class Combined:
    """The weighted sum. The score, and the right completion of a record, are those of the first reward that has one.

    A reward that is None does not apply to this answer and adds nothing; one at least must apply.

    Beside one that is awaited, the others must be fast, as they run on the actor's loop.
    """

    def __init__(self, rewards: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        self._rewards, self._weights = rewards, weights
        self.system_prompt = _first(rewards, "system_prompt")
        self.may_block = any(getattr(reward, "may_block", False) for reward in rewards.values())
        self.reads_answer = any(getattr(reward, "reads_answer", True) for reward in rewards.values())
        target = _first(rewards, "target")
        if target is not None:
            self.target = target
        self.is_no_answer = _first(rewards, "is_no_answer")
        self._set_up = [one for one in rewards.values() if hasattr(one, "set_up")]
        if self._set_up:
            self.set_up, self.tear_down = self._all("set_up"), self._all("tear_down")

    async def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        steps, parts, last = {}, dict[str, float](), list(self._rewards)[-1]
        for name, reward in self._rewards.items():
            value = await call(reward, record, completion, prompt)
            if value is None and (steps or name != last):
                continue
            steps[name] = as_step(value, f"reward {name}")
            parts |= {**steps[name].parts, name: steps[name].reward}
        total = sum(self._weights[name] * step.reward for name, step in steps.items())
        score = next((step.score for step in steps.values() if step.score is not None), None)
        return Step(reward=total, score=score, parts=parts)

    def _all(self, method: str) -> Callable[[], None]:
        def call() -> None:
            for reward in self._set_up:
                getattr(reward, method)()

        return call


def combine(rewards: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> Combined:
    """One reward of several; `weights` has the same names."""
    return suited(Combined, *rewards.values())(rewards, weights)


def _first(rewards: Mapping[str, RewardFunction], attribute: str) -> Any:
    return next((found for reward in rewards.values() if (found := getattr(reward, attribute, None)) is not None), None)


NGRAMS = range(8, 17)
MAX_NGRAM_REPEATS, MAX_SENTENCE_REPEATS, SENTENCE_WORDS = 6, 4, 8


class Tags:
    """1 if every tag of reward.format_tags stands there once, in order, and the last one ends the completion."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._tags = settings.format_tags or ANSWER_TAGS

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return float(has_format(whole(completion).rstrip(), self._tags))


class Repetition:
    """-1 for a completion that repeats itself, else 0."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        pass

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return -float(repeats_itself(completion))


class Length:
    """A penalty on length, 0 to -1: the share of reward.length_chars that a completion uses, in characters."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._limit = settings.length_chars

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return -min(1.0, len(completion) / self._limit)


def repeats_itself(text: str) -> bool:
    """An n-gram of 8 to 16 words occurs 6 times or more, or a sentence of more than 8 words 4 times or more."""
    words = text.split()
    for size in NGRAMS:
        grams = Counter(zip(*(words[start:] for start in range(size)), strict=False))
        if grams and max(grams.values()) >= MAX_NGRAM_REPEATS:
            return True
    sentences = Counter(part.strip() for part in re.split(r"[.!?\n]", text) if len(part.split()) > SENTENCE_WORDS)
    return bool(sentences) and max(sentences.values()) >= MAX_SENTENCE_REPEATS


MakeReward = Callable[[RewardConfig, RecordShape], RewardFunction]
REWARDS: dict[str, MakeReward] = {
    "exact": Exact,
    "math": FreeMath,
    "boxed": Boxed,
    "think_answer_tags": ThinkAnswerTags,
    "code": Code,
    "tags": Tags,
    "length": Length,
    "repetition": Repetition,
    "judge": Judge,
    "model": reward_model,
}
Written = Callable[[Any, str], RewardFunction | None]
"""Takes a module's attribute and its name; returns the reward that it is, or None if it is a factory."""
OWN = "Write a function of messages or completion, as docs/rewards.md shows, or a factory of (settings, shape)."


def make_reward(
    settings: RewardConfig, shape: RecordShape, system_prompt: str | None = None,
    written: Written = lambda found, name: None,
) -> RewardFunction:
    """The reward that `reward.type` names, or the weighted sum of those in `reward.weights`.

    Args:
        system_prompt: `data.system_prompt`.
        written: takes functions of a user's module as rewards; without it a module holds factories.
    Raises:
        ConfigError: an unknown name, both settings at once, or an own one that makes no reward.
    """
    if not settings.weights:
        assert settings.type is not None, "neither reward.type nor reward.weights is set"
        resolved = resolve(settings.type, REWARDS, setting="reward.type")
        found = _made(resolved, settings.type, settings, shape, written)
        _tell_prompt({settings.type: found}, system_prompt)
        return found
    if settings.type is not None:
        raise ConfigError(
            f"reward.type={settings.type} and reward.weights are both set: leave one of them out, or put "
            f"{settings.type} into reward.weights."
        )
    rewards = {
        name: _made(resolve(name, REWARDS, setting="reward.weights"), name, settings, shape, written)
        for name in settings.weights
    }
    _tell_prompt(rewards, system_prompt)
    return combine(rewards, settings.weights)


def _made(found: Any, name: str, settings: RewardConfig, shape: RecordShape, written: Written) -> RewardFunction:
    if name in REWARDS:
        return found(settings, shape)
    if (own := written(found, name)) is not None:
        return own
    try:
        made = found(settings, shape)
    except (Exception, SystemExit) as error:  # of the user's own code
        raise ConfigError(f"reward {name} cannot be made: {describe(error)}. {OWN}") from error
    if not callable(made):
        raise ConfigError(f"reward {name} cannot be made: it gave {made!r:.60}, which scores nothing. {OWN}")
    return made


def _tell_prompt(rewards: Mapping[str, RewardFunction], system_prompt: str | None) -> None:
    """Show reward models what the model reads."""
    for reward in rewards.values():
        if isinstance(reward, RewardModel):
            reward.answered_under = _first(rewards, "system_prompt") if system_prompt == "auto" else system_prompt
