"""The agent of `bench.agents`: the package openai, a parent and a subagent, lost answers, and deaths.

What happens to it is written to the file that AGENTS_LOG names, a line each: `dropped`, `died` or `done`.
"""

from __future__ import annotations

import os
import random
from typing import Any

import httpx2 as httpx  # the library under openai's client
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
    """Four calls in two conversations that alternate; the task scores the parent's last answer."""
    http = httpx.AsyncClient(transport=LosesAnswers(), timeout=60)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=5) as client:
        child = [{"role": "user", "content": record["prompt"][::-1] + "ab"}]
        parent = [{"role": "user", "content": record["prompt"]}]
        dies_at = random.randrange(4) if random.random() < DYING else None
        for turn, messages in enumerate((child, parent, child, parent)):
            if turn == dies_at:
                note("died")
                raise ConnectionError("the sandbox is gone")
            if turn > 1:
                messages.append({"role": "user", "content": "a"})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    note("done")
