"""streamrl serve MODEL_OR_RUN [--host HOST] [--port PORT] [--api-key KEY] [key=value ...]

Serve a model to agents and evaluation harnesses, without a learner: a run, as runs/quickstart-001, one of its versions,
as runs/quickstart-001@40, or a Hugging Face checkpoint. In the forms of OpenAI (chat completions, responses), Anthropic
(messages) and vLLM (token ids in and out):

  streamrl serve runs/quickstart-001 --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions --json '{"messages": [{"role": "user", "content": "hello"}]}'

Without --api-key, or STREAMRL_API_KEY in the environment, programs of this machine alone are served, by the name
localhost or a loopback address, and every key is taken; with another --host a key is made and printed. Ctrl-C ends it,
and so does an engine that is dead, with status 2.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from actors.endpoint.server import serve
from actors.endpoint.sessions import Session, Sessions, same_key
from actors.engines.base import Engine, GenerateRequest
from actors.local_policy import LocalPolicy, local_config, open_policy, sampling_message
from actors.settings import episode_rules
from actors.trajectory.chat_form import ChatCompletion
from actors.trajectory.client import Client
from actors.trajectory.rules import EpisodeRules, PromptTooLongError
from actors.trajectory.transcript import Transcript
from streamrl.commands import exit_at_once, status_of
from streamrl.config.addresses import in_url, is_loopback
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import SamplingConfig
from streamrl.errors import ConfigError, EpisodeFullError
from streamrl.messages import Sampling

DEATH_CHECK_S = 0.5


@dataclass(slots=True, eq=False, kw_only=True)
class ServedSession(Session):
    """Calls with the requests' own sampling; `max_new_tokens` are those of a request that names no number."""

    max_new_tokens: int
    recorded: bool = False

    async def _create(self, options: Mapping[str, Any]) -> ChatCompletion:
        limits = {} if options.get("max_completion_tokens") else {"max_tokens": self.max_new_tokens}
        try:
            return await self.client.chat.create(**{**limits, **options})
        except EpisodeFullError as error:
            raise PromptTooLongError(
                f"the prompt leaves no room in {self.client.max_tokens} tokens, of prompt and answer together: send "
                "less, or serve with a larger rollout.max_prompt_tokens"
            ) from error


class ServedSessions(Sessions):
    """`key`: the only one that is taken; None takes any, and none."""

    def __init__(self, session: ServedSession, key: str | None) -> None:
        super().__init__()
        self._session, self._key = session, key

    def get(self, key: str) -> Session | None:
        known = self._key is None or same_key(key, self._key)
        return self._session if known else None


def served(
    policy: LocalPolicy, sampling: SamplingConfig, rules: EpisodeRules, max_tokens: int, key: str | None
) -> ServedSessions:
    """The session of a model and its engine.

    Args:
        sampling: of requests that name none.
        rules: those of an episode; its stops hold here, its limits do not.
        max_tokens: of a prompt and its answer together.
    """
    limits = {name: max_tokens for name in ("max_prompt_tokens", "max_new_tokens", "max_tokens")}
    client = Client(
        policy.engine, policy.renderer, replace(rules, **limits, max_turns=1 << 62), Transcript(),
        seed=secrets.randbits(63), sampling=sampling_message(sampling),
        generating=nullcontext, pause=lambda: None, resume=lambda: None, on_progress=lambda: None,
        open_session=nullcontext,
    )
    return ServedSessions(ServedSession("", "", client=client, max_new_tokens=sampling.max_new_tokens), key)


async def run(source: str, words: Sequence[str], host: str, port: int, key: str | None) -> int:
    config = local_config(source, words)
    print(f"loading {config.policy.model_path}", file=sys.stderr, flush=True)
    policy, sampling = await open_policy(config), eval_sampling(config)
    try:
        rules = episode_rules(config, sampling, trains=False)
        longest = getattr(policy.engine, "max_tokens", longest_sequence(config))
        sessions = served(policy, sampling, rules, longest, key)
        try:
            runner, port = await serve(sessions, host.strip("[]"), port, keyless=key is None)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port} cannot be had, take --port 0: {error}") from error
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        print(f"serving {source} at http://{in_url(host)}:{port}/v1", flush=True)
        print(f"for Anthropic's clients http://{in_url(host)}:{port}; Ctrl-C ends it", file=sys.stderr, flush=True)
        try:
            await _until_dead(policy.engine, ended)
        finally:
            await runner.cleanup()
    finally:
        await policy.engine.close()
    return 0


async def _until_dead(engine: Engine, ended: asyncio.Event) -> None:
    """Return once `ended` is set. Raises the engine's own EngineError if it is dead before: it would serve nothing."""
    while not ended.is_set():
        if engine.stats().extra.get("dead"):
            await engine.generate(GenerateRequest(prompt_ids=[0], sampling=Sampling(), max_new_tokens=1, seed=0))
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), DEATH_CHECK_S)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="streamrl serve", usage=argparse.SUPPRESS, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="MODEL_OR_RUN", help="a run, RUN@N, RUN@best, or a Hugging Face checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--api-key", default=os.environ.get("STREAMRL_API_KEY"), help="the only key that is taken")
    parser.add_argument("words", nargs="*", default=[], metavar="key=value",
                        help="settings, such as rollout.max_prompt_tokens=4096")
    given = parser.parse_intermixed_args(words)
    key = given.api_key or None
    if key is None and not is_loopback(f"tcp://{given.host}:{given.port}"):
        key = f"sk-{secrets.token_urlsafe(24)}"
        print(f"api key: {key}", flush=True)
    return status_of(lambda: asyncio.run(run(given.source, given.words, given.host, given.port, key)))


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
