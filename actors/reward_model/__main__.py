"""streamrl reward-model DIR [--port PORT] [--device DEVICE]

Score conversations with a reward model, a sequence classifier with one label, for reward.model.url:

  streamrl reward-model models/my-reward-model --port 8100 --device cuda:0

  POST {"messages": [{"role": ..., "content": ...}, ...]}  ->  {"score": 1.25}

It listens on loopback only; reach it from other machines by an ssh tunnel. reward.model.path=DIR starts one by itself.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import suppress
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

from envs.json_handler import JsonHandler
from envs.rewards.local_model import READY
from streamrl import parent_watch
from streamrl.commands import status_of
from streamrl.environment import ChatMessage
from streamrl.errors import ConfigError, TaskError

MAX_BODY = 16 << 20


class Server(ThreadingHTTPServer):
    """Bound when it is made; port 0 takes a free one."""

    request_queue_size = 512  # of connections that are not yet accepted
    daemon_threads = True

    def __init__(self, port: int, score: Any) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.score = score


class Handler(JsonHandler):
    """One request after the other on a connection that stays open."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        try:
            messages = [ChatMessage.of(one).as_dict() for one in self.request_json(MAX_BODY)["messages"]]
        except (ValueError, KeyError, TypeError, TaskError) as error:
            why = f": one {error}" if isinstance(error, TaskError) else ""
            self.answer(400, {"error": f"the body must be JSON with messages, a list of role and content{why}"})
            return
        try:
            score = self.server.score(messages)
        except Exception as error:  # the caller reads what the model said
            self.answer(422, {"error": f"{type(error).__name__}: {error}"})
            return
        if math.isfinite(score):
            self.answer(200, {"score": score})
        else:
            self.answer(422, {"error": f"the score is {score}"})


def main(words: list[str]) -> int:
    parent_watch.watch(lambda: os._exit(0))  # before anything that takes long
    parser = argparse.ArgumentParser(
        prog="streamrl reward-model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a checkpoint with its tokenizer")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    args = parser.parse_args(words)
    answer = parent_watch.take_stdout()  # the actor that starts this reads one line of it
    import torch  # after the parent is watched: these take seconds

    from actors.reward_model.scorer import BatchingScorer, RewardScorer

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"the device {device} cannot be used, choose another with --device: {error!s:.200}"
        ) from error
    server = Server(args.port, BatchingScorer(RewardScorer(args.path, device)).score)
    print(f"{READY}http://127.0.0.1:{server.server_address[1]}/score", file=answer, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(status_of(partial(main, sys.argv[1:])))
