"""streamrl chat MODEL_OR_RUN [--version N] [key=value ...]

Talk to a model: a run, such as runs/quickstart-001, or a Hugging Face checkpoint. The conversation is sent whole; a
model without a chat template gets the lines as they are. A run answers with its exported model, or with any version
that one of its checkpoints holds, also while it trains:

  streamrl chat runs/quickstart-001 --version 40
  streamrl chat runs/quickstart-001@40

  /new     forget the conversation
  /quit    end, as do Ctrl-D and Ctrl-C
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import sys
from collections.abc import Sequence

from actors.engines.base import GenerateRequest
from actors.local_policy import LocalPolicy, local_config, open_policy, sampling_message
from streamrl.commands import exit_at_once, status_of
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import SamplingConfig
from streamrl.environment import ChatMessage
from streamrl.errors import ConfigError, StreamrlError


async def answer(
    sampling: SamplingConfig, policy: LocalPolicy, messages: Sequence[ChatMessage], seed: int
) -> str:
    """The model's next turn."""
    request = GenerateRequest(
        prompt_ids=policy.renderer.render(messages), sampling=sampling_message(sampling),
        max_new_tokens=sampling.max_new_tokens, seed=seed, stop=tuple(sampling.stop),
    )
    return policy.renderer.text((await policy.engine.generate(request)).token_ids)


async def run(source: str, words: Sequence[str]) -> int:
    config = local_config(source, words)
    print(f"loading {config.policy.model_path}", file=sys.stderr, flush=True)
    policy = await open_policy(config)
    sampling = eval_sampling(config)
    how = "greedy (temperature 0)" if sampling.temperature == 0.0 else f"temperature {sampling.temperature:g}"
    print(f"at most {sampling.max_new_tokens} new tokens, {how} as in evaluations (rollout.test.sampling); /new, /quit",
          file=sys.stderr)
    messages: list[ChatMessage] = []
    try:
        while (line := await asyncio.to_thread(_read)) is not None and line != "/quit":
            if line == "/new":
                messages = []
            elif line:
                messages.append(ChatMessage("user", line))
                try:
                    text = await answer(sampling, policy, messages, random.getrandbits(63))
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


def with_version(words: Sequence[str]) -> list[str]:
    """The words, `RUN --version N` as `RUN@N`. Raises ConfigError without a number or `best`."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--version=") else [word])]
    if "--version" not in words:
        return words
    at = words.index("--version")
    number, rest = " ".join(words[at + 1 : at + 2]), words[:at] + words[at + 2 :]
    if not number.isdigit() and not number.startswith("best") or not rest:
        raise ConfigError(f"--version {number or 'without a number'}: write streamrl chat RUN --version 40, or best")
    return [f"{rest[0]}@{number}", *rest[1:]]


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    logging.disable(logging.WARNING)
    if isinstance(sys.stdin, io.TextIOWrapper):  # a line may come in another encoding
        sys.stdin.reconfigure(errors="replace")

    def talk() -> int:
        source, *rest = with_version(words)
        return asyncio.run(run(source, rest))

    return status_of(talk, interrupted="")


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
