"""RL2's `generate(config, tokenizer, router_url, sample)`, and what such files import from `RL2`.

The file drives the episode: it sends token ids with `async_request(router_url, "generate", ...)`, and keeps states,
actions and rewards in `sample.state_dicts`. Here the request goes to the actor's engine, which records what it read and
sampled; of the file's own record only the rewards are taken, each for the turn on whose tokens it stands.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, ClassVar

import httpx

from envs.async_compat import call
from envs.data.shapes import RecordShape
from streamrl.environment import ChatMessage, GenerationClient, Record, Step
from streamrl.errors import EpisodeFullError, TaskError

StateDict = dict[str, list[Any]]
SAMPLING_PARAMS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop")
"""Those of SGLang that mean something here; the others are about how a server shows its answer."""
_numbers = count()
_episodes: dict[str, _Episode] = {}


class Status(Enum):
    RUNNING = "running"
    ABORTED = "aborted"
    DONE = "done"


@dataclass
class Sample:
    """An episode of RL2: the record, input and output of the model's last turn, and the sequences so far."""

    Status: ClassVar = Status

    sample: dict[str, Any] = field(default_factory=dict)
    state_text: str = ""
    action_text: str = ""
    state_dict: StateDict = field(default_factory=dict)
    state_dicts: list[StateDict] = field(default_factory=list)
    turn: int = 0
    metrics: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    status: Status = Status.RUNNING
    previous_action_text: str = ""
    previous_response_length: int = 0


def initialize_state_dict(tokenizer: Any, state_text: str) -> StateDict:
    """A sequence that begins with this text."""
    ids = list(tokenizer.encode(state_text, add_special_tokens=False))
    return _tokens(ids, is_action=False, logps=[0.0] * len(ids))


def add_llm_response(sample: Sample, response: Mapping[str, Any]) -> None:
    """The model's turn, as the engine answered."""
    tokens = response["meta_info"]["output_token_logprobs"]
    turn = _tokens([token[1] for token in tokens], is_action=True, logps=[token[0] for token in tokens])
    _extend(sample.state_dict, turn)
    sample.action_text = sample.previous_action_text + response["text"]
    sample.previous_action_text, sample.previous_response_length = "", 0
    sample.turn += 1


def add_env_response(tokenizer: Any, sample: Sample, response: Mapping[str, Any]) -> None:
    """The environment's turn: the reward on the model's last token, and what is read next."""
    sample.state_dict["rewards"][-1] = response["reward"]
    if response["done"]:
        sample.status = Status.DONE
        sample.state_dicts.append(sample.state_dict)
        return
    before, after = sample.state_text + sample.action_text, response["next_state"]
    if after.startswith(before):
        _extend(sample.state_dict, initialize_state_dict(tokenizer, after[len(before) :]))
    else:
        sample.state_dicts.append(sample.state_dict)
        sample.state_dict = initialize_state_dict(tokenizer, after)
    sample.state_text = after


async def base_generate(*args: Any, **options: Any) -> Any:
    """Refuse the call: with an `env_step` alone, actors drive the generation themselves."""
    raise TaskError("base_generate was called by the file: leave the call out, actors generate and call its env_step.")


async def async_request(url: str, endpoint: str, method: str = "POST", *_: Any, **options: Any) -> Any:
    """Send a request to this actor's engine, if the address is its own; to any other service over HTTP."""
    episode = _episodes.get(url)
    if episode is None:
        options = {key: value for key, value in options.items() if key not in ("max_trials", "retry_delay")}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.request(method, f"{url}/{endpoint}", **options)
        answer.raise_for_status()
        return answer.json()
    match endpoint.strip("/"):
        case "generate":
            return await episode.generate(options["json"])
        case "list_workers":
            return {"urls": [url]}
        case "v1/models":
            return {"data": [{"max_model_len": episode.max_tokens}]}
    raise TaskError(f"the file asked router_url for {endpoint!r}: an actor has generate, list_workers and v1/models.")


class GenerateEnv:
    """Plays a user's `generate(config, tokenizer, router_url, sample)`.

    Args:
        name: file and function, for messages.
        shape: names the fields of a record.
    """

    def __init__(self, generate: Callable[..., Any], name: str, shape: RecordShape) -> None:
        self._generate, self._name, self._shape = generate, name, shape

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        """The record's prompt, for which a tiny model is made; the loop itself decides what the model reads."""
        return self._shape.opening(record)

    async def rollout(self, record: Record, client: GenerationClient) -> Step:
        url = f"actor://{next(_numbers)}"
        episode = _episodes[url] = _Episode(client)
        sample = Sample(copy.deepcopy(dict(record)))
        cut = False
        try:
            await call(self._generate, self._config(record, client), client.tokenizer, url, sample)
        except EpisodeFullError:
            cut = True
            if sample.state_dict and all(one is not sample.state_dict for one in sample.state_dicts):
                sample.state_dicts.append(sample.state_dict)
        finally:
            del _episodes[url]
        for turn, reward in enumerate(episode.rewards(sample.state_dicts, self._name)):
            client.reward(reward, turn=turn)
        return Step(0.0, truncated=cut)

    def _config(self, record: Record, client: GenerationClient) -> Any:
        """The config that RL2 gives to such a function, as far as it means something here."""
        from streamrl.config.load import as_omegaconf

        try:
            field_name = self._shape.prompt_field(record)
        except TaskError:  # the file makes its own prompts
            field_name = "prompt"
        return as_omegaconf({
            "sampling_params": dict(client.sampling), "max_turns": client.num_turns_left, "responses_per_prompt": 1,
            "apply_chat_template": not isinstance(record.get(field_name), str), "messages_key": field_name,
            "prompt_key": field_name,
        })


class _Episode:
    """The engine as one episode of such a file sees it."""

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._lengths: list[int] = []  # tokens of each turn that has any
        self.max_tokens = client.num_tokens_left

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """A request in SGLang's form."""
        params = dict(payload.get("sampling_params") or {})
        known = {key: params[key] for key in SAMPLING_PARAMS if key in params}
        answer = await self._client.generate(payload.get("input_ids") or payload["text"], **known)
        if answer.token_ids:
            self._lengths.append(len(answer.token_ids))
        tokens = [[logprob, token, None] for logprob, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        return {"text": answer.text, "meta_info": {
            "output_token_logprobs": tokens, "completion_tokens": len(tokens), "finish_reason": {"type": answer.finish},
        }}

    def rewards(self, state_dicts: list[StateDict], name: str) -> list[float]:
        """The reward of each turn: the sum over its tokens and those of the environment after them."""
        turn_of = [turn for turn, length in enumerate(self._lengths) for _ in range(length)]
        rewards = [0.0] * len(self._lengths)
        num_actions = 0
        for state_dict in state_dicts:
            for is_action, reward in zip(state_dict["action_mask"], state_dict["rewards"], strict=True):
                num_actions += bool(is_action)
                if reward and num_actions <= len(turn_of):
                    rewards[turn_of[max(0, num_actions - 1)]] += reward
        if num_actions != len(turn_of):
            raise TaskError(
                f"{name} left {num_actions} action tokens in sample.state_dicts, and {len(turn_of)} were sampled: all "
                "of them are trained, so add each response with add_llm_response, and each sequence to state_dicts."
            )
        return rewards


def _tokens(ids: list[int], *, is_action: bool, logps: list[float]) -> StateDict:
    num = len(ids)
    return {
        "states": list(ids), "actions": list(ids) if is_action else [0] * num, "action_mask": [int(is_action)] * num,
        "logps": logps, "rewards": [0.0] * num,
    }


def _extend(state_dict: StateDict, more: StateDict) -> None:
    for key, values in more.items():
        state_dict[key].extend(values)
