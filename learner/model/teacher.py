"""The teacher of on-policy distillation: a frozen model that reads the policy's tokens, here or behind a server.

A server tells log-probs of a prompt's tokens, in the form of vLLM's OpenAI-compatible one:

    GET  URL/models        {"data": [{"id": ...}]}
    POST URL/completions   {"model", "prompt": [ids], "max_tokens": 1, "prompt_logprobs": 0}
                           {"choices": [{"prompt_logprobs": [null, {"<id>": {"logprob": ...}}, ...]}]}
    POST ROOT/tokenize     {"model", "prompt": text, "add_special_tokens": false}  ->  {"tokens": [ids]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from envs.rewards.services import HttpService
from learner.data.packing import MicroBatch
from learner.model.config_file import model_config
from learner.model.networks import FrozenPolicy
from learner.model.policy import Policy, load_policy
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError, StreamrlError, TaskError
from streamrl.weights.model_folder import check_folder

SETTING = "distill.teacher"
PROBE = "The quick brown fox: 12345 + 678 = ?\n\tdef f(x): return x ** 2  # naïve, 漢字"
"""Both tokenizers must make the same ids of this text and of the policy's special tokens."""
_TIMEOUT_S, _AT_ONCE = 300.0, 16


class RemoteTeacher(FrozenPolicy):
    """Scores this rank's sequences with one request each, several at once.

    Args:
        url: up to `/v1`.
        model_dir: the policy's, with its tokenizer.
    Raises:
        ConfigError: no such server answers, or its tokenizer makes other ids.
    """

    def __init__(self, url: str, model_dir: Path) -> None:
        self.name, self._url = "teacher", url.rstrip("/")
        options = {"timeout_s": _TIMEOUT_S, "max_concurrent": _AT_ONCE, "api_key_env": None, "name": SETTING}
        self._completions = HttpService(f"{self._url}/completions", **options)
        self._tokenize = HttpService(f"{self._url.removesuffix('/v1')}/tokenize", **options)
        self._thread, self._runner = ThreadPoolExecutor(1), asyncio.Runner()  # a notebook's thread has a loop already
        self._model = self._served_model()
        self._check_tokenizer(model_dir)

    @property
    def shares_prompts(self) -> bool:
        """Each request holds a whole sequence."""
        return False

    def score(self, batch: MicroBatch) -> Tensor:
        """As `FrozenPolicy.score`. Raises StreamrlError: the server gave no log-probs, after several tries."""
        logprobs = torch.zeros(batch.num_scored)
        for place, value in self._run(self._scored(batch)):
            logprobs[place] = value
        return logprobs.to(batch.tokens.device)

    async def _scored(self, batch: MicroBatch) -> list[tuple[int, float]]:
        """(place in [M], log-prob) of every scored token."""
        rows = sequences(batch)
        replies = await asyncio.gather(*(
            self._completions.post({
                "model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
            })
            for ids, _ in rows
        ))
        told = [reply["choices"][0]["prompt_logprobs"] for reply in replies]
        return [
            (place, float(tokens[at][str(ids[at])]["logprob"]))
            for (ids, scored), tokens in zip(rows, told, strict=True) for place, at in scored
        ]

    def _run(self, work: Any) -> Any:
        try:
            return self._thread.submit(self._runner.run, work).result()
        except (TaskError, LookupError, TypeError, ValueError) as error:
            raise StreamrlError(
                f"{SETTING}={self._url} gave no log-probs of a prompt ({type(error).__name__}: {error}): look at the "
                "server; it must take prompt_logprobs in /completions, as vLLM's does"
            ) from error

    def _served_model(self) -> str:
        try:
            reply = httpx.get(f"{self._url}/models", timeout=30.0, trust_env=False).raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{SETTING}={self._url}: no model is served there ({type(error).__name__}: {error}): start one "
                "(`vllm serve MODEL`), and give its address up to /v1, such as http://HOST:8000/v1."
            ) from error

    def _check_tokenizer(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False)
        text = PROBE + "".join(tokenizer.all_special_tokens)
        payload = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            theirs = self._thread.submit(self._runner.run, self._tokenize.post(payload)).result()["tokens"]
        except (TaskError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{SETTING}={self._url} cannot be asked whether it has the policy's tokenizer ({error}): serve the "
                "teacher with vLLM, whose /tokenize tells, or give its checkpoint in place of the address."
            ) from error
        mine = tokenizer.encode(text, add_special_tokens=False)
        if list(theirs) != mine:
            raise ConfigError(
                f"{SETTING}={self._url} serves {self._model}, which has another tokenizer than the policy "
                f"({model_dir}): of the same text it makes {list(theirs)[:8]} ..., and the policy's {mine[:8]} .... "
                "The teacher scores the tokens that the policy sampled: take one of the same family."
            )


def sequences(batch: MicroBatch) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Ids of each sequence of a micro-batch, and (place in [M], place in the sequence) of its scored tokens."""
    lengths = torch.tensor(batch.packing.lengths)
    ends = lengths.cumsum(0)
    index, targets = batch.score_index.cpu(), batch.targets.tolist()
    rows = [(part.tolist(), []) for part in batch.tokens.cpu().split(batch.packing.lengths)]
    starts = (ends - lengths).tolist()
    for place, (at, sequence) in enumerate(
        zip(index.tolist(), torch.searchsorted(ends, index, right=True).tolist(), strict=True)
    ):
        ids, scored = rows[sequence]
        after = at - starts[sequence] + 1
        if after == len(ids):  # the last token was not packed: no state after it is needed
            ids.append(targets[place])
        scored.append((place, after))
    return [row for row in rows if row[1]]


def load_teacher(
    path: str | Path, policy: Policy, model_dir: Path, ranks: Ranks, *, passes: Mapping[str, Any], dtype: torch.dtype,
    temperature: float = 1.0,
) -> FrozenPolicy:
    """The teacher, sharded as the policy is; or the one that a server has, where `path` is its address.

    Args:
        model_dir: where the policy came from, with its tokenizer.
        passes: how the policy makes them, as `learner.model.policy.pass_options` says.
        temperature: at which the policy samples.
    Raises:
        ConfigError: no such checkpoint, or one with other tokens.
    """
    if is_url(path):
        return _remote(str(path), model_dir, temperature)
    check_teacher(path, model_dir)
    try:
        model = load_policy(path, dtype=dtype, masters=dtype, ranks=ranks, **passes)
    except ConfigError as error:
        raise ConfigError(f"{SETTING}={path} cannot be the teacher, take another: {error}") from error
    if model.vocab_size < policy.vocab_size:
        raise ConfigError(
            f"{SETTING}={path} has rows for {model.vocab_size} tokens and the policy for {policy.vocab_size}: it could "
            "not score all that the policy may sample; take a teacher with at least as many."
        )
    return FrozenPolicy(model, name="teacher")


def is_url(path: str | Path) -> bool:
    """Whether it is the address of a server."""
    return str(path).startswith(("http://", "https://"))


def _remote(url: str, model_dir: Path, temperature: float) -> RemoteTeacher:
    if temperature != 1.0:
        raise ConfigError(
            f"{SETTING}={url} with rollout.train.sampling.temperature={temperature}: a server tells log-probs at "
            "temperature 1 only; sample at 1, or give the teacher's checkpoint in place of its address."
        )
    return RemoteTeacher(url, model_dir)


def check_teacher(path: str | Path, model_dir: Path, *, temperature: float = 1.0) -> None:
    """Raise ConfigError unless each token of the policy's tokenizer is the same one for the teacher."""
    if is_url(path):
        _remote(str(path), model_dir, temperature)
        return
    from transformers import AutoTokenizer

    model_config(path, setting=SETTING)
    check_folder(path, said=f"{SETTING}={path}")
    mine, theirs = (
        AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).get_vocab() for folder in (model_dir, path)
    )
    different = [token for token, number in mine.items() if theirs.get(token) != number]
    if not different:
        return
    token = min(different, key=mine.__getitem__)
    other = theirs.get(token)
    known = "does not have it" if other is None else f"has it as {other}"
    raise ConfigError(
        f"{SETTING}={path} has another tokenizer than the policy ({model_dir}): token {mine[token]} is {token!r} there "
        f"and the teacher {known} ({len(different)} of {len(mine)} tokens differ). The teacher scores the tokens that "
        "the policy sampled: take a teacher of the same family."
    )
