"""Defaults for the GPU of a learner rank: the planner's values for settings that nothing gives, and the transports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch

from learner.fit.estimate import GIB, WORKING, Uncounted, engine_memory, job_of, num_parameters, rank_memory
from learner.fit.models import config_of_model
from learner.fit.proposal import LARGE_BATCH, MOST_SEQUENCES
from streamrl.architectures.decode_graphs import graph_bytes
from streamrl.config.devices import (
    BUDGET,
    COMPILE,
    CONCURRENT,
    NEW_TOKENS,
    ON_HOST,
    RECOMPUTE,
    Choice,
    apply,
    gpus_per_engine,
    likely_placement,
    most_answer_tokens,
)
from streamrl.config.eval_sets import longest_sequence, splits
from streamrl.config.load import Loaded
from streamrl.config.schema import Config, LearnerConfig
from streamrl.errors import ConfigError, in_one_line
from streamrl.gpus import gpu_of, visible_gpus
from streamrl.weights.transport import load_transport

CONTEXTS = (8192, 4096, 2048)
"""Tokens of the longest prompt and answer, of which the first is taken that fits; `streamrl fit` assumes the same."""
_WEIGHTS_ON_DEVICE = 3  # of a native engine that receives a version on its GPU


def choose(loaded: Loaded, device: torch.device, notify: Callable[[str], None]) -> list[Choice]:
    """Choose for this machine beyond `loaded.choices`, or in place of one of them; the config gets the choices, too.

    Args:
        notify: called with a line about what takes long or cannot be told.
    """
    config, found = loaded.config, list[Choice]()
    gpu = gpu_of("cuda") if device.type == "cuda" else None
    total, where = gpu.total_bytes if gpu is not None else 0, likely_placement(config, visible_gpus(os.environ))
    model = config_of_model(str(config.policy.model_path)) if total and not config.policy.tiny.enabled else None
    share = min((one or 1.0 for one in where.actor_shares), default=1.0)
    if model is not None and loaded.open:
        notify("counting the memory of a step to choose its size")
        limit = total * (where.learner_share or config.learner.gpu_memory_share or 1.0)
        why_not = why_not_compiled(config.learner, device) if COMPILE in loaded.open else ""
        found = plan(loaded, model, limit=limit, engine=share * total, why_not_compiled=why_not, notify=notify)
    no_room = _no_room(loaded, model, share * total) if model is not None else ""
    refused = dict[str, str]()
    for key, names in [(one.key, one.value) for one in loaded.choices if one.key.endswith(".transports")]:
        refused |= {one: no_room or _refusal(one, device) for one in names if one not in {*ON_HOST, *refused}}
        usable = [one for one in names if not refused.get(one)]
        if usable != names:
            found.append(Choice(key, usable, "; ".join(dict.fromkeys(why for why in refused.values() if why))))
    apply(config, found)
    return found


def plan(
    loaded: Loaded, model: Any, *, limit: float, engine: float, why_not_compiled: str = "",
    notify: Callable[[str], None] = lambda _: None,
) -> list[Choice]:
    """The first candidate that fits a learner rank, or the smallest one.

    Args:
        limit: bytes that the rank may take of its GPU. engine: those of one of the engine's GPUs.
        why_not_compiled: why layers cannot be compiled; empty if they can.
    """
    config, open_keys, rank = loaded.config, loaded.open, None
    positions = getattr(model.get_text_config(), "max_position_embeddings", None) or CONTEXTS[0]
    for one in _candidates(loaded, positions):
        try:
            rank = rank_memory(job_of(one, longest=longest_sequence(one), on_gpu=True), model)
        except Uncounted as error:
            notify(str(error))
        if rank is None or rank.total <= limit:
            break
    sampling, longest = one.rollout.train.sampling, longest_sequence(one)
    need = "its memory cannot be counted" if rank is None else (
        f"a learner rank needs {rank.total / GIB:.1f} of {limit / GIB:.1f} GiB"
    )
    found = [
        Choice(NEW_TOKENS, sampling.max_new_tokens, f"sequences of {longest:,} tokens, the model has {positions:,}"),
        Choice(BUDGET, one.learner.max_tokens_per_device, need),
        Choice(RECOMPUTE, one.policy.gradient_checkpointing, need),
        Choice(COMPILE, not why_not_compiled, why_not_compiled or "the learner's GPU compiles a small function"),
    ]
    if CONCURRENT in open_keys:
        room = engine_memory(model, 2 * num_parameters(model), engine, gpus_per_engine(config)).sequences(longest)
        num = config.actors.num_concurrent
        if most_answer_tokens(config) is None:  # else the ids of each token would not fit
            num = max(num, min(MOST_SEQUENCES, room))
        found.append(Choice(CONCURRENT, num, f"keys and values of {room:,} whole sequences fit on a GPU of an engine"))
    return [choice for choice in found if choice.key in open_keys]


def _candidates(loaded: Loaded, positions: int) -> Iterator[Config]:
    """The config with other sizes, the longest answers first; for each the fewest means that save memory."""
    config, open_keys = loaded.config, loaded.open
    turns = max(one.env.max_turns for one, _ in splits(config))
    prompt, given = config.rollout.max_prompt_tokens, config.rollout.train.sampling.max_new_tokens
    most = positions if BUDGET in open_keys else min(positions, config.learner.max_row_tokens)
    answers = [(min(context, most) - prompt) // turns for context in CONTEXTS]
    if (tokens := most_answer_tokens(config)) is not None:
        answers = [min(one, tokens // config.actors.num_concurrent) for one in answers]
    answers = [one for one in answers if one >= given] if NEW_TOKENS in open_keys else []
    for new_tokens in dict.fromkeys(answers or [given]):
        longest = prompt + turns * new_tokens
        ranks = config.learner.mesh.context
        small = -(-longest // ranks)
        large = max(small, LARGE_BATCH if turns == 1 else min(LARGE_BATCH, positions // ranks))
        budgets = (large, small) if BUDGET in open_keys else (config.learner.max_tokens_per_device,)
        means = (False, True) if RECOMPUTE in open_keys else (config.policy.gradient_checkpointing,)
        for recompute, budget in dict.fromkeys(
            ((means[0], budgets[0]), (means[-1], budgets[0]), (means[-1], budgets[-1]))
        ):
            one = deepcopy(config)
            one.rollout.train.sampling.max_new_tokens, one.learner.max_tokens_per_device = new_tokens, budget
            one.policy.gradient_checkpointing = recompute
            yield one


def why_not_compiled(learner: LearnerConfig, device: torch.device) -> str:
    """Why layers cannot be compiled for the device, or nothing; found with a small function and its gradient."""
    if learner.mesh.tensor > 1:
        return "learner.mesh.tensor divides layers that are not compiled"
    try:
        values = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.silu(x) * x)(values).sum().backward()
    except Exception as error:  # of a compiler, a driver, a package that is missing: none is worth a run
        return f"nothing compiles on {device} ({in_one_line(error)[:120]})"
    return ""


def _no_room(loaded: Loaded, model: Any, engine: float) -> str:
    """Why the weights cannot come on the GPU of an engine with so many bytes, or nothing."""
    config = loaded.config
    need = _WEIGHTS_ON_DEVICE * 2 * num_parameters(model) + WORKING
    if config.actors.engine == "native":
        need += graph_bytes(model, config.actors.num_concurrent, longest_sequence(config))
    if need <= engine:
        return ""
    room = f"{engine / GIB:.1f} GiB of an engine"
    return f"{_WEIGHTS_ON_DEVICE} copies of the weights, and what passes take, do not fit the {room}"


def _refusal(name: str, device: torch.device) -> str:
    """Why this machine cannot use the transport, or nothing."""
    try:
        load_transport(name, setting="publish.transports").require(str(device))
    except ConfigError as error:
        return in_one_line(error)
    return ""
