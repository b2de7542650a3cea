"""The agent of `bench.agents`: the packages openai and anthropic, a parent and a subagent, lost answers, and deaths.

What happens to it is written to the file that AGENTS_LOG names, a line each: the API of a call,
`dropped`, `died` or `done`.
"""

from __future__ import annotations

import os
import random
from typing import Any

import anthropic
import httpx2 as httpx  # the library under both clients
import openai

DROPPED, DYING = 0.05, 1 / 3


class LosesAnswers(httpx.AsyncHTTPTransport):
    """A network that loses one answer in twenty after the server sent it; the SDK repeats the call."""

    async def handle_async_request(self, request: Any) -> Any:
        response = await super().handle_async_request(request)
        if random.random() < DROPPED:
            await response.aread()
            note("dropped")
            raise httpx.ReadError("the answer was lost", request=request)
        return response


def note(what: str) -> None:
    with open(os.environ["AGENTS_LOG"], "a", encoding="utf-8") as out:
        out.write(f"{what}\n")


async def run(record: Any, base_url: str, api_key: str) -> None:
    """Four calls in two conversations that alternate, each by an API of its own; the task scores the parent's last
    answer."""
    http = httpx.AsyncClient(transport=LosesAnswers(), timeout=60)
    fixed = {"api_key": api_key, "http_client": http, "max_retries": 5}
    async with http:
        asks = Asks(openai.AsyncOpenAI(base_url=base_url, **fixed),
                    anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), **fixed))
        child = [{"role": "user", "content": record["prompt"][::-1] + "ab"}]
        parent = [{"role": "user", "content": record["prompt"]}]
        apis = random.choices(("chat", "messages", "responses"), k=2)
        dies_at = random.randrange(4) if random.random() < DYING else None
        for turn, messages in enumerate((child, parent, child, parent)):
            if turn == dies_at:
                note("died")
                raise ConnectionError("the sandbox is gone")
            if turn > 1:
                messages.append({"role": "user", "content": "a"})
            api = apis[turn % 2]
            messages.append({"role": "assistant", "content": await getattr(asks, api)(messages)})
            note(api)
    note("done")


class Asks:
    """The text of the next answer, by each API."""

    def __init__(self, by_openai: openai.AsyncOpenAI, by_anthropic: anthropic.AsyncAnthropic) -> None:
        self._openai, self._anthropic = by_openai, by_anthropic

    async def chat(self, messages: Any) -> str | None:
        answer = await self._openai.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content

    async def responses(self, messages: Any) -> str:
        # A copy: the package would see later messages in a repeated call.
        return (await self._openai.responses.create(model="policy", input=[*messages])).output_text

    async def messages(self, messages: Any) -> str:
        answer = await self._anthropic.messages.create(model="policy", messages=messages, max_tokens=100)
        return "".join(block.text for block in answer.content if block.type == "text")
