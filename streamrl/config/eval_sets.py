"""Evaluation sets: the held-out records of the run's own task, and what `eval.datasets` names beside them.

    eval.datasets.gsm8k=gsm8k_test.jsonl          a file, scored as the run's answers are
    eval.datasets:
      math500: {path: math500.jsonl, reward: {type: math}, num_samples: 500, num_responses: 4}
      sums: {env: {name: reasoning_gym.chain_sum}}
      sampled: {sampling: {temperature: 1}}       the run's own records, sampled differently

A set is the run's config with the set's settings on top, so whatever reads a config can play it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from streamrl.config.load import with_settings
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import Config, SamplingConfig
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean

SECTIONS = {"data": "data", "env": "env", "reward": "reward", "sampling": "rollout.test.sampling"}
"""What a set may say of a section -> that section of the settings."""
OWN = ("num_samples", "num_responses", "solved_score")
"""Settings of `eval` that a set may have for itself."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation set; the run's own held-out records have the name ""."""

    name: str
    config: Config
    other_task: bool = False
    """Whether its records or their environment are not the run's."""

    @property
    def sampling(self) -> SamplingConfig:
        return eval_sampling(self.config)

    @property
    def setting(self) -> str:
        """The name of its setting, for messages."""
        return f"eval.datasets.{self.name}" if self.name else "eval"


def eval_sets(config: Config) -> list[EvalSet]:
    """Every set that an evaluation of this run asks, the run's own first.

    Raises:
        ConfigError: a name, a key or a value that no set can have, with the set's name.
    """
    own = [EvalSet("", config)] if config.eval.num_samples else []
    seen: dict[str, str] = {}
    for name in config.eval.datasets:
        if not NAME.fullmatch(str(name)):
            raise ConfigError(
                f"eval.datasets names a set {name!r}: use 1 to 32 of A-Z a-z 0-9 _ - and begin with a letter"
            )
        if (twin := seen.setdefault(str(name).lower(), name)) != name:
            raise ConfigError(f"eval.datasets names the sets {twin} and {name}: their names must differ in more than "
                              "upper and lower case")
    return [*own, *(_named(config, name, given) for name, given in config.eval.datasets.items())]


def splits(config: Config) -> Iterator[tuple[Config, SamplingConfig]]:
    """Settings and sampling of training and of each evaluation set: what engines and limits must have room for."""
    yield config, config.rollout.train.sampling
    yield config, eval_sampling(config)
    for one in eval_sets(config):
        if one.name:
            yield one.config, one.sampling


def longest_sequence(config: Config, positions: int | None = None) -> int:
    """Tokens that any sequence of the run may have, prompt and answers; engines make room for them.

    Args:
        positions: those of the model, where known: turns after the first have what these leave.
    """
    lengths = [(one.env.max_turns, sampling.max_new_tokens) for one, sampling in splits(config)]
    longest = config.rollout.max_prompt_tokens + max(turns * new_tokens for turns, new_tokens in lengths)
    if any(turns > 1 for turns, _ in lengths):
        longest = max(longest, config.learner.max_row_tokens)
    return longest if positions is None else min(longest, max(positions, first_turn(config)))


def first_turn(config: Config) -> int:
    """Tokens of the longest prompt and the longest answer to it: a model needs positions for these."""
    return config.rollout.max_prompt_tokens + max(sampling.max_new_tokens for _, sampling in splits(config))


def _named(config: Config, name: str, given: Any) -> EvalSet:
    where = f"eval.datasets.{name}"
    values = _values(where, given)
    try:
        found = with_settings(replace(config, eval=replace(config.eval, datasets={})), values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not found.eval.num_samples:
        raise ConfigError(f"{where} asks for no prompt, because eval.num_samples=0: give {where}.num_samples")
    return EvalSet(name, found, any(key in values for key in ("env", "data", "reward")))


def _values(where: str, given: Any) -> dict[str, Any]:
    """The settings that an entry stands for, nested as in a settings file."""
    if isinstance(given, str | list):
        given = {"path": given}
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"{where}={given} must be a file such as test.jsonl, or a mapping of path, {', '.join(SECTIONS)}, "
            f"{', '.join(OWN)}"
        )
    known = ("path", *SECTIONS, *OWN)
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(str(key), known) or f" Choose from {', '.join(known)}."
            raise ConfigError(f"Unknown key `{where}.{key}`:{hint}")
        if key in SECTIONS and not isinstance(value, Mapping):
            raise ConfigError(f"{where}.{key}={value} must be a mapping, e.g. {where}.{key}.KEY=VALUE")
    data = dict(given.get("data", {}))
    if "path" in given:
        if "path" in data:
            raise ConfigError(f"{where} has a path and a data.path: leave one of them out")
        data["path"] = given["path"]
    if "path" in data:  # every record of the file is held out
        data = {"test_path": None, "test_ratio": 0.0, "num_samples": None, "weights": None, **data}
    own = {key: given[key] for key in OWN if key in given}
    values: dict[str, Any] = {"eval": own} if own else {}
    for key in ("env", "reward"):
        values |= {key: dict(given[key])} if key in given else {}
    values |= {"data": data} if data else {}
    values |= {"rollout": {"test": {"sampling": dict(given["sampling"])}}} if "sampling" in given else {}
    return values


def sampling_note(config: Config) -> str:
    """Describe how evaluation samples differently from training, after the word "evaluation"; "" if it does not."""
    train, test = config.rollout.train.sampling, eval_sampling(config)
    pairs = ((item.name, getattr(test, item.name), getattr(train, item.name)) for item in fields(SamplingConfig))
    differ = {name: f"{name} {_short(here)} (training {_short(there)})" for name, here, there in pairs if here != there}
    is_greedy = test.temperature == 0 and differ.pop("temperature", "") != ""
    greedy = f"is greedy (temperature 0); training samples at temperature {train.temperature:g}" if is_greedy else ""
    others = f"samples with {', '.join(differ.values())}" if differ else ""
    return "; ".join(part for part in (greedy, others) if part)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
