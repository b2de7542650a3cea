"""streamrl reward-model DIR [--port PORT] [--device DEVICE]

Score conversations with a reward model, a sequence classifier with one label, for reward.model.url:

  streamrl reward-model models/my-reward-model --port 8100 --device cuda:0

  POST {"messages": [{"role": ..., "content": ...}, ...]}  ->  {"score": 1.25}

It listens on loopback only; reach it from other machines by an ssh tunnel. reward.model.path=DIR starts one by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from envs.data.shapes import tool_schemas
from envs.json_service import listening
from envs.rewards.local_model import READY
from streamrl import parent_watch
from streamrl.commands import status_of
from streamrl.environment import ChatMessage
from streamrl.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from actors.reward_model.scorer import BatchingScorer

MAX_BODY = 16 << 20


async def serve(port: int, scorer: BatchingScorer, out: TextIO) -> None:
    """Score until the task is canceled; the first line of `out` is the address."""

    async def answer(_: Any, body: Any) -> tuple[int, dict[str, Any]]:
        try:
            messages = [ChatMessage.of(one).as_dict() for one in body["messages"]]
            tools = tool_schemas(body)
        except (ValueError, KeyError, TypeError, TaskError) as error:
            why = f": one {error}" if isinstance(error, TaskError) else ""
            return 400, {"error": f"the body must be JSON with messages, a list of role and content{why}"}
        try:
            score = await asyncio.wrap_future(scorer.ask(messages, tools))
        except Exception as error:  # the caller reads what the model said
            return 422, {"error": f"{type(error).__name__}: {error}"}
        return (200, {"score": score}) if math.isfinite(score) else (422, {"error": f"the score is {score}"})

    async with listening(answer, "127.0.0.1", port, max_bytes=MAX_BODY) as (_, port):
        print(f"{READY}http://127.0.0.1:{port}/score", file=out, flush=True)
        await asyncio.Event().wait()


def main(words: list[str]) -> int:
    parent_watch.watch(lambda: os._exit(0))  # before anything that takes long
    parser = argparse.ArgumentParser(
        prog="streamrl reward-model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a checkpoint with its tokenizer")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    args = parser.parse_args(words)
    out = parent_watch.take_stdout()  # the actor that starts this reads one line of it
    import torch  # after the parent is watched: these take seconds

    from actors.reward_model.scorer import BatchingScorer, RewardScorer

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"the device {device} cannot be used, choose another with --device: {error!s:.200}"
        ) from error
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(args.port, BatchingScorer(RewardScorer(args.path, device)), out))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(partial(main, sys.argv[1:])))
