"""A fake hub that hands a learner the batches of a log, the same whenever they are asked for; no process, no socket."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from learner.hub.context.settings import HubSettings
from streamrl.messages import (
    BatchShare,
    Group,
    HubStatus,
    Member,
    MemberStatus,
    Outcome,
    PlanRow,
    ReturnReason,
    Sampling,
    Span,
    Turn,
)
from streamrl.messages.codec import encode, pack_ids, pack_logprobs

VOCABULARY = 14
PROMPT_TOKENS, ANSWER_TOKENS = 6, 8


def batch(version: int, *, steps_per_batch: int, num_groups: int, group_size: int) -> BatchShare:
    """The batch that is trained at this version: random tokens, log-probs, rewards and lags, drawn from its number."""
    rng, plan, frames = np.random.default_rng(version), [], []
    for place in range(num_groups):
        group_id = version * num_groups + place
        lag = int(rng.integers(0, 3)) * steps_per_batch
        members = tuple(_member(rng, index, max(0, version - lag)) for index in range(group_size))
        frames.append(bytes(encode(Group(
            incarnation=1, seq=group_id + 1, group_id=group_id, attempt=0, outcome=Outcome.COMPLETE,
            reason=ReturnReason.NONE, detail="", sampling=Sampling(), members=members, stats={}, answers=(),
        ))))
        plan += [
            PlanRow(group_id, one.index, 0, PROMPT_TOKENS + ANSWER_TOKENS, ANSWER_TOKENS, one.reward,
                    version - one.versions[0].version)
            for one in members
        ]
    return BatchShare(version, tuple(plan), tuple(frames))


def _member(rng: np.random.Generator, index: int, version: int) -> Member:
    ids = rng.integers(4, VOCABULARY, PROMPT_TOKENS + ANSWER_TOKENS)
    reward = float(rng.integers(0, 2)) if index else 1.0
    return Member(
        index=index, status=MemberStatus.FINISHED, prompt_ids=pack_ids(ids[:PROMPT_TOKENS].tolist()),
        token_ids=pack_ids(ids[PROMPT_TOKENS:].tolist()),
        logprobs=pack_logprobs((-2.6 + 0.3 * rng.standard_normal(ANSWER_TOKENS)).tolist()),
        mask=((0, ANSWER_TOKENS),), versions=(Span(1, version, 0, ANSWER_TOKENS),),
        turns=(Turn(0, ANSWER_TOKENS, reward),), reward=reward, scores={}, finish="stop",
    )


class FakeHubProcess:
    """Leaves the note that a hub would leave."""

    def __init__(self, settings: HubSettings, keys: object = None) -> None:
        (Path(settings.run_dir) / "hub.json").write_text(json.dumps({"connect": "tcp://127.0.0.1:1"}))

    def check(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass


class FakeHubLink:
    """Serves the log up to `last`, the version after which the run is to stop; remembers no ledger."""

    last: int | None = None
    shape: dict[str, int] = {}

    def __init__(self, _endpoint: str, *, version: int, **_watching: Any) -> None:
        self.status, self.evals, self.halted = HubStatus(version, {}, ()), [], None

    def next_batch(self, version: int) -> BatchShare | None:
        return None if version == self.last else batch(version, **self.shape)

    def freeze(self, version: int) -> bytes:
        return b"no ledger, version %d" % version

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_until_up = trained = publish = saved = evaluate = wait_for_evals = poll = refresh_status = shutdown = _nothing
    close = _nothing
