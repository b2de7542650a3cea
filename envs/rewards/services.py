"""Rewards that another process computes, over HTTP: a judge that reads the answer, a reward model that scores it.

Both are `async`: any number of episodes waits at once, and no thread is held. A service that fails is tried again after
a pause that doubles; then the episode fails like any other whose environment raised.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from envs.call_clock import stopped
from envs.data.chat_template import text_with_calls
from envs.data.shapes import RecordShape, tool_schemas
from envs.rewards.local_model import LocalModel, check_checkpoint
from streamrl.config.addresses import key_of
from streamrl.config.schema import RewardConfig, ServiceConfig
from streamrl.environment import SYSTEM_ROLES, ChatMessage, Record, Step
from streamrl.errors import ConfigError, TaskError

MODEL_PART = "reward_model"
"""The part of a reward that a reward model gave."""
MAX_TRIES = 3
FIRST_PAUSE_S = 0.5
_AGAIN = {408, 409, 429, 500, 502, 503, 504}
_RANGE = r"(?:\s*\(\s*\d+\s*(?:-|–|to)\s*\d+\s*\))?"
_SCORE = re.compile(rf"(?:score|rating){_RANGE}(?:\s+(?:is|of))?\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_OF_MOST = re.compile(r"(?<=\d)\W*(?:/|out\s+of)\W*\d+(?:\.\d+)?", re.IGNORECASE)
_SCORE_KEYS = ("score", "reward", "probs", "embedding", "data")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class HttpService:
    """POST of JSON with tries, a limit on requests at once, and one connection pool for each event loop."""

    def __init__(self, url: str, *, timeout_s: float, max_concurrent: int, api_key_env: str | None, name: str) -> None:
        self._url, self._timeout_s, self._max_concurrent, self._name = url, timeout_s, max_concurrent, name
        key = key_of(f"{name}.api_key_env", api_key_env)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    async def post(self, payload: Mapping[str, Any]) -> Any:
        """The JSON answer. Raises TaskError naming the service, what it said and the setting to look at."""
        problem = ""
        for number in range(MAX_TRIES):
            if number:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (number - 1))
            try:
                response = await self._client().post(self._url, json=payload, headers=self._headers)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}".strip()
                continue
            if response.status_code == 200:
                return response.json()
            problem = f"status {response.status_code}: {response.text:.200}"
            if response.status_code not in _AGAIN:
                break
        raise TaskError(f"{self._name}.url={self._url} gave no answer: {problem}")

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=self._max_concurrent)
            timeout = httpx.Timeout(self._timeout_s, pool=None)  # waiting for one's turn is not the service's fault
            self._clients[loop] = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        return self._clients[loop]


class Judge:
    """A chat model, behind an OpenAI-compatible endpoint, reads question and answer and gives a number."""

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._judge, self._shape, self._correct = settings.judge, shape, settings.correct
        if self._judge.url is None:
            raise ConfigError("reward.type=judge asks a service: give its address, reward.judge.url=http://...")
        if "{completion}" not in self._judge.prompt:
            raise ConfigError("reward.judge.prompt has no {completion}: the judge would not see what it judges.")
        self._service = _service(self._judge, "reward.judge")

    async def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        judge = self._judge
        question = "\n\n".join(f"{message.role}: {text_with_calls(message)}" for message in prompt)
        answer = self._shape.answer(record)
        text = judge.prompt
        for name, value in (("question", question), ("answer", "" if answer is None else str(answer))):
            text = text.replace("{" + name + "}", value)
        text = text.replace("{completion}", completion)  # last: a completion may hold the other words
        message = {"role": "user", "content": text}
        reply = await self._service.post(
            {"model": judge.model, "messages": [message], "temperature": 0.0, "max_tokens": judge.max_tokens}
        )
        score = read_score(_content(reply), judge.max_score)
        return Step(reward=self._correct * score, score=score, parts={"judge": score})


def read_score(text: str, max_score: float) -> float:
    """A judge's number as a share of `max_score`: after the last "score" or "rating", else the last number of the text.

    In "3/10" and "3 out of 10" it is the first.

    Raises TaskError if there is none.
    """
    told = _OF_MOST.sub("", text)
    found = _SCORE.findall(told) or _NUMBER.findall(told)
    if not found:
        raise TaskError(f"the judge gave no number: {text!r:.120}. Let reward.judge.prompt ask for one.")
    return min(1.0, max(0.0, float(found[-1]) / max_score))


class RewardModel:
    """A reward model behind a scoring endpoint (`/classify` or `/pooling` of an inference server, or your own)."""

    answered_under: str | None = None
    """The system prompt that the model read before conversations without one."""

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._model = settings.model
        self._service = None if settings.model.url is None else _service(settings.model, "reward.model")

    async def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        service = await self._ready()
        messages = [*prompt, ChatMessage("assistant", completion)]
        if self.answered_under is not None and messages[0].role not in SYSTEM_ROLES:
            messages.insert(0, ChatMessage("system", self.answered_under))
        text = "\n\n".join(f"{message.role}: {text_with_calls(message)}" for message in messages)
        whole = [message.as_dict() for message in messages]
        question = {"model": self._model.model, "input": text, "messages": whole}
        if tools := tool_schemas(record):
            question["tools"] = tools
        score = first_number(await service.post(question))
        return Step(reward=score, parts={MODEL_PART: score})

    async def _ready(self) -> HttpService:
        assert self._service is not None
        return self._service


class LocalRewardModel(RewardModel):
    """The same with `reward.model.path`: an actor starts the service, and starts it again if it ends."""

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        super().__init__(settings, shape)
        assert settings.model.path is not None
        check_checkpoint(settings.model.path)
        self._process = LocalModel(settings.model.path, settings.model.device)
        self._restart: asyncio.Task[None] | None = None

    def set_up(self) -> None:
        """Load the model, which may take minutes. Raises ConfigError if it cannot be loaded."""
        url = self._process.start()
        if self._model.url != url:
            model = replace(self._model, url=url)
            self._service = _service(model, "reward.model")
            self._model = model  # last: its address says that the service is there

    def tear_down(self) -> None:
        self._process.stop()

    async def _ready(self) -> HttpService:
        if not self._process.running or self._process.url != self._model.url:
            if self._restart is None or self._restart.done():  # one for all episodes that wait
                self._restart = asyncio.ensure_future(asyncio.to_thread(self.set_up))
            with stopped():  # minutes for a large model, and its loader tells of a process that ended
                await asyncio.shield(self._restart)
        return await super()._ready()


def reward_model(settings: RewardConfig, shape: RecordShape) -> RewardModel:
    """Behind an address, or started here. Raises ConfigError: neither or both are given, or there is no such model."""
    model = settings.model
    if (model.url is None) == (model.path is None):
        raise ConfigError(
            "reward.type=model needs a reward model: give its folder, reward.model.path=DIR, or the address of a "
            f"service, reward.model.url=http://...; got path={model.path} and url={model.url}."
        )
    return (RewardModel if model.path is None else LocalRewardModel)(settings, shape)


def first_number(reply: Any) -> float:
    """The score in a reply: its `score` or `reward`, or that of the first entry of its `data`, `probs` or `embedding`.

    Raises TaskError if there is none.
    """
    value = reply
    while not isinstance(value, int | float):
        if isinstance(value, Mapping):
            value = next((value[key] for key in _SCORE_KEYS if key in value), None)
        elif isinstance(value, Sequence) and not isinstance(value, str) and value:
            value = value[0]
        else:
            raise TaskError(f"the reward model's reply holds no score: {reply!r:.120}")
    return float(value)


def _content(reply: Any) -> str:
    try:
        return str(reply["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
        raise TaskError(f"the judge's reply is not that of a chat completion: {reply!r:.120}") from error


def _service(settings: ServiceConfig, name: str) -> HttpService:
    assert settings.url is not None
    return HttpService(
        settings.url, timeout_s=settings.timeout_s, max_concurrent=settings.max_concurrent,
        api_key_env=settings.api_key_env, name=name,
    )  # fmt: skip
