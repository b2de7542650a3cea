"""The one session of `streamrl serve`: every key's, or that of the key that was given; nothing is recorded."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from actors.endpoint.sessions import Session
from actors.local_policy import LocalPolicy, sampling_message
from actors.settings import episode_rules
from actors.trajectory.chat_form import ChatCompletion
from actors.trajectory.client import Client
from actors.trajectory.rules import PromptTooLongError
from actors.trajectory.transcript import Transcript
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import Config
from streamrl.errors import EpisodeFullError


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


class ServedSessions:
    """`key`: the only one that is taken; None takes any, and none."""

    def __init__(self, session: ServedSession, key: str | None) -> None:
        self._session, self._key = session, key

    def get(self, key: str) -> Session | None:
        known = self._key is None or secrets.compare_digest(key.encode(errors="surrogateescape"), self._key.encode())
        return self._session if known else None

    def is_over(self, key: str) -> bool:
        return False


def served(config: Config, policy: LocalPolicy, key: str | None) -> ServedSessions:
    """The session of a model and its engine."""
    sampling, longest = eval_sampling(config), longest_sequence(config)
    rules = replace(
        episode_rules(config, sampling), max_prompt_tokens=longest, max_new_tokens=longest, max_tokens=longest,
        max_turns=1 << 62,
    )
    client = Client(
        policy.engine, policy.renderer, rules, Transcript(), seed=config.run.seed, sampling=sampling_message(sampling),
        generating=nullcontext, pause=lambda: None, resume=lambda: None, on_progress=lambda: None,
        open_session=nullcontext,
    )
    return ServedSessions(ServedSession("", "", client=client, max_new_tokens=sampling.max_new_tokens), key)
