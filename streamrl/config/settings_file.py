"""A settings file of one's own as the `key=value` words that would say the same, and words beside files of ours."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from streamrl.errors import ConfigError

MAX_CHARS, MAX_VALUES = 1_000_000, 100_000
"""Of a settings file: an alias in YAML counts as what it stands for, so a few lines can mean billions of values."""
REPLACES: Mapping[str, tuple[str, ...]] = {
    "policy.model_path": ("policy.tiny.enabled",), "policy.tiny.enabled": ("policy.model_path",),
    "env.name": ("env.path", "env.options", "data.path", "data.test_path", "reward.type", "reward.weights"),
    "env.path": ("env.options", "reward.type", "reward.weights"),
    "env.options": ("env.options",), "reward.type": ("env.path", "reward.weights"),
    "reward.weights": ("env.path", "reward.type"), "data.path": ("data.test_path", "data.weights"),
}
"""A setting on the command line -> what it replaces in the file beside its own value there."""
_NAME, _ODD, _ESCAPED = re.compile(r"[^:=(){}\[\],\s\\'\"]+"), re.compile(r"([\\(){}\[\]:=, \t])"), r"\\\1"


def is_file(word: str) -> bool:
    """Whether a word of the command line names a settings file."""
    return "=" not in word and word.endswith((".yaml", ".yml"))


def checked_text(file: Path) -> str:
    """The file's text. Raises ConfigError for one that means too much, YAMLError for one that is no YAML."""
    text = file.read_text(encoding="utf-8")
    too_much = f"it has more than {MAX_CHARS} characters"
    if len(text) <= MAX_CHARS:
        root, too_much = yaml.compose(text, Loader=yaml.SafeLoader), f"its aliases mean more than {MAX_VALUES} values"
        if root is None or _num_values(root, {}) <= MAX_VALUES:
            return text
    raise ConfigError(f"{too_much}: a settings file holds settings only, and each once")


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values in a node with its aliases written out; infinite for one that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_mapping = isinstance(node, yaml.MappingNode)
        children = [one for pair in node.value for one in pair] if is_mapping else node.value
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def as_words(path: str, values: Mapping[str, Any], typed: Sequence[str]) -> list[str]:
    """The settings of a file that no typed word replaces.

    A run's own `config.yaml` names its directory and says whether it was resumed: that is left out, for a new run.
    """
    keys = {word.partition("=")[0].lstrip("+~") for word in typed}
    replaced = keys.union(*(REPLACES.get(key, ()) for key in keys))
    own_dir = values.get("run", {}).get("dir") if isinstance(values.get("run"), Mapping) else None
    if isinstance(own_dir, str) and Path(path).resolve().parent == Path(os.path.abspath(own_dir)).resolve():
        replaced |= {"run.dir", "checkpoint.resume"}
    return [
        f"{key}={literal(value)}" for key, value in leaves(values)
        if key not in replaced and not key.startswith(tuple(f"{one}." for one in replaced))
    ]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting in nested sections under its whole name, as `policy.optimizer.lr`.

    A mapping with keys that no name can hold, as `{my_package.rewards:short: 0.5}`, is one value.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and all(_NAME.fullmatch(str(inner)) for inner in value):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def literal(value: Any) -> str:
    """A value in the grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_ODD.sub(_ESCAPED, str(key))}:{literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, str):
        return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + "\\'" * len(end[2]), value, flags=re.DOTALL) + "'"
    return str(value)


class _Texts(yaml.SafeLoader):
    """Every scalar but null is the text that was typed: 1e5, true and 0x10 too."""


_Texts.yaml_implicit_resolvers = {
    first: [one for one in known if one[0] in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def as_typed(text: str) -> Any:
    """The values of YAML, scalars as the texts that were typed."""
    return yaml.load(text, Loader=_Texts)


def keep_texts(values: dict[str, Any], typed: Any, names: Container[str], prefix: str = "") -> None:
    """Put the texts that were typed in the place of values of the settings of these names, which are texts."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(typed, Mapping):
            keep_texts(value, typed.get(key), names, f"{prefix}{key}.")
        elif f"{prefix}{key}" in names and isinstance(typed, Mapping):
            values[key] = typed[key]


def quote_texts(text: str, value: Any) -> str:
    """A text in the grammar of overrides, with quotes around what is no text in `value`, as which it was read."""
    if isinstance(value, bool | int | float):
        return literal(text)
    if isinstance(value, list) and text.startswith("[") and text.endswith("]"):
        return f"[{quote_each(text[1:-1], value)}]"
    return text


def quote_each(text: str, values: Sequence[Any]) -> str:
    """The same for texts with commas between them."""
    parts = parts_of(text)
    return ",".join(map(quote_texts, parts, values)) if len(parts) == len(values) else text


def parts_of(text: str) -> list[str]:
    """Split a text at the commas outside quotes and brackets; brackets of a name may be open."""
    parts = _SPLIT.findall(text)
    return [part.strip() for part in (parts if ",".join(parts) == text.rstrip(",") else text.split(","))]


_SPLIT = re.compile(r"""((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^\]]*\]|[^,\[\]'"])+)(?:,|$)""")
"""A piece between two commas that neither quotes nor brackets enclose."""


def key_given_twice(text: str) -> str | None:
    """The first key that stands twice in one mapping of a value, as `{a: 1, a: 2}`: the parser would drop one."""
    mappings: list[set[str] | None] = []  # around the place: the keys of a mapping so far, None for a list
    word, is_key, quote, escaped = "", False, "", False
    for character in text:
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "{[":
            mappings.append(set() if character == "{" else None)
            word, is_key = "", character == "{"
        elif character in "}]":
            del mappings[-1:]
            is_key = False
        elif character == ",":
            word, is_key = "", bool(mappings) and mappings[-1] is not None
        elif character == ":" and is_key:
            keys, name, is_key = mappings[-1], word.strip(), False
            assert keys is not None
            if name in keys:
                return name
            keys.add(name)
        else:
            word += character
    return None


def given_values(overrides: Sequence[str]) -> dict[str, str]:
    """The keys of `key=value` words, without a +, and their values as text."""
    return {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}


def lost_of_recipe(recipe: Mapping[str, Any], experiment: Mapping[str, Any], given: Mapping[str, str]) -> list[str]:
    """Settings of the recipe, as `key=value`, that the experiment sets otherwise and no override gives."""
    own, others = _dotted(recipe), _dotted(experiment)
    return [
        f"{key}={json.dumps(value, default=list)}" for key, value in own.items()
        if key in others and others[key] != value and key not in given
    ]


OWNED: Sequence[tuple[str, str | None, Sequence[str]]] = (
    ("kl.mode", "off", ("kl.coef", "kl.controller", "kl.options", "kl.allow_biased")),
    ("loss.surrogate", None, ("loss.options", "loss.cap")), ("loss.opsm_delta", "null", ("loss.opsm_when",)),
    ("advantage.estimator", None, ("advantage.rho_bar_pg",)),
    *(("advantage.estimator", name, ("critic", "advantage.lam"))
      for name in ("group", "reinforce_pp", "vtrace_critic_free")),
    ("entropy.adapt", "none", ("entropy.target", "entropy.step", "entropy.low", "entropy.high")),
    ("distill.teacher", "null", ("distill.coef", "distill.center", "distill.reward_weight")),
)
"""A setting, its value (None: any), and what a recipe has set for another value of it, which then does nothing."""


def disowned(recipe: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Settings of the recipe that an override of another one leaves without effect: that override, and the value."""
    own, found = _dotted(recipe), dict[str, tuple[str, Any]]()
    for switch, wanted, names in OWNED:
        word = given.get(switch)
        if word is None or word != (wanted or word) or word == str(own.get(switch)):
            continue
        for key, value in own.items():
            if any(f"{key}.".startswith(f"{name}.") for name in names) and key not in given:
                found[key] = (f"{switch}={word}", value)
    return found


def _dotted(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
