"""streamrl chat MODEL_OR_RUN [key=value ...]

Talk to a model: a run, as runs/quickstart-001, or a Hugging Face checkpoint. The conversation is sent whole; a
model without a chat template gets the lines as they are.

  /new     forget the conversation
  /quit    end, as do Ctrl-D and Ctrl-C
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Sequence

from actors.engines.base import GenerateRequest
from actors.local_policy import LocalPolicy, local_config, open_policy, sampling_message
from streamrl.config.schema import Config
from streamrl.environment import ChatMessage
from streamrl.errors import StreamrlError


async def answer(config: Config, policy: LocalPolicy, messages: Sequence[ChatMessage], seed: int) -> str:
    """The model's next turn, drawn as in training."""
    sampling = config.rollout.train.sampling
    request = GenerateRequest(
        prompt_ids=policy.renderer.render(messages), sampling=sampling_message(sampling),
        max_new_tokens=sampling.max_new_tokens, seed=seed, stop=tuple(sampling.stop),
    )
    return policy.renderer.text((await policy.engine.generate(request)).token_ids)


async def run(source: str, words: Sequence[str]) -> int:
    config = local_config(source, words)
    print(f"loading {config.policy.model_path}", file=sys.stderr, flush=True)
    policy = await open_policy(config)
    limits = config.rollout.train.sampling
    words_now = f"at most {limits.max_new_tokens} new tokens, temperature {limits.temperature:g}; /new, /quit"
    print(words_now, file=sys.stderr)
    messages: list[ChatMessage] = []
    try:
        while (line := await asyncio.to_thread(_read)) is not None and line != "/quit":
            if line == "/new":
                messages = []
            elif line:
                messages.append(ChatMessage("user", line))
                try:
                    text = await answer(config, policy, messages, random.getrandbits(63))
                except StreamrlError as error:  # as too long a conversation
                    messages.pop()
                    print(f"error: {error} (/new starts again)", file=sys.stderr)
                    continue
                messages.append(ChatMessage("assistant", text))
                print(text, flush=True)
    finally:
        await policy.engine.close()
    return 0


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words) or "=" in words[0]:
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    logging.disable(logging.WARNING)
    try:
        return asyncio.run(run(words[0], words[1:]))
    except StreamrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the thread that waits for a line must not hold the process
