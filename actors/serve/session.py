"""The one session of `streamrl serve`: every key's, or that of the key that was given; nothing is recorded."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from actors.endpoint.sessions import Session, same_key
from actors.local_policy import LocalPolicy, sampling_message
from actors.trajectory.chat_form import ChatCompletion
from actors.trajectory.client import Client
from actors.trajectory.rules import EpisodeRules, PromptTooLongError
from actors.trajectory.transcript import Transcript
from streamrl.config.schema import SamplingConfig
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
        known = self._key is None or same_key(key, self._key)
        return self._session if known else None

    def is_over(self, key: str) -> bool:
        return False

    def is_admin(self, key: str) -> bool:
        return False

    def named(self, name: str) -> Session | None:
        return None


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
