"""The teacher of on-policy distillation: a frozen model that reads the policy's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from learner.model.config_file import model_config
from learner.model.policy import Policy, load_policy
from learner.model.reference import FrozenPolicy
from learner.model.teacher.remote import SETTING, RemoteTeacher
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError
from streamrl.weights.model_folder import check_folder


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
