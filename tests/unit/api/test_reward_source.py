"""Functions are written into a module from their source, with what they use, or refused with the name and a remedy."""

import asyncio
import concurrent.futures
import email.utils
import functools
import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
import xml.etree as trees
import xml.etree.ElementTree
from collections import Counter
from os import path as os_path
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from streamrl.api.reward_source import REWARD_NAMES, module_of
from streamrl.errors import ConfigError, StreamrlError

SCALE, NAMES, TABLE = 2.0, ("a", "b"), {"x": [1, None, True], "y": {"z": "é'\n"}}
NUMBER = re.compile(r"-?\d+", re.IGNORECASE)
OPEN = open(__file__)  # noqa: SIM115


class Judge:
    def __call__(self, messages, answer):
        return 1.0

    def score(self, messages, answer):
        return 1.0


JUDGE = Judge()


def reward_fn(messages, answer):
    return float(messages[-1]["content"].strip() == answer)


def uses_constants(completions, answer, **kwargs):
    return [SCALE * (text in NAMES) + len(TABLE["y"]["z"]) for text in completions]


def uses_modules(completions: list[str], answer: Any, **kwargs: Judge) -> list[float]:
    import string  # its own
    return [math.sqrt(len(json.dumps(text))) + len(string.digits) + Counter(text)["a"] for text in completions]


def uses_a_pattern(completion, answer):
    return float(bool(NUMBER.search(completion)) and os_path.join("a", "b") == "a/b")


def helped(completion, answer, limit=SCALE):
    return _first(completion) + limit


def _first(text):
    return _second(text[1:]) + 1 if text else 0.0


def _second(text):
    return _first(text)  # each needs the other


async def waits(messages, answer):
    await asyncio.sleep(0)
    return 1.0


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)
    return wrapper


def silently_doubled(function):
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)
    return wrapper


@doubled
def decorated(completion, answer):
    return 1.0


@silently_doubled
def badly_decorated(completion, answer):
    return 1.0


def made(weight):
    def weighted(completion, answer):
        return weight * len([SCALE for _ in completion])
    return weighted


alias = _first


def uses_an_alias(completion, answer):
    return alias(completion)


def raises_ours(completion, answer):
    raise StreamrlError(f"{__name__}"[:0] + completion)


def written(function, tmp_path: Path) -> Any:
    """The reward of the written module, run where nothing of this module is."""
    text = module_of(function)
    file = tmp_path / "reward.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("written_reward", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (found,) = [getattr(module, name) for name in ("reward_fn", "reward", "compute_score") if hasattr(module, name)]
    return found


def as_in_main(monkeypatch, *functions: Any) -> None:
    """As if they had been defined in a notebook: no other process can import them."""
    for function in functions:
        monkeypatch.setattr(function, "__module__", "__main__")


MINE = [_first, _second, doubled, reward_fn, helped]


@pytest.mark.parametrize(("function", "arguments", "wanted"), [
    (reward_fn, {"messages": [{"content": " 4 "}], "answer": "4"}, 1.0),
    (uses_constants, {"completions": ["a", "q"], "answer": []}, [5.0, 3.0]),
    (uses_modules, {"completions": ["aa"], "answer": []}, [14.0]),
    (uses_a_pattern, {"completion": "x-3", "answer": ""}, 1.0),
    (helped, {"completion": "abc", "answer": ""}, 5.0),
    (decorated, {"completion": "", "answer": ""}, 2.0),
    (made(3), {"completion": "ab", "answer": ""}, 6),
    (uses_an_alias, {"completion": "abc", "answer": ""}, 3.0),
])
@pytest.mark.parametrize("in_main", [False, True])
def test_a_written_function_returns_what_it_returns(function, arguments, wanted, in_main, tmp_path, monkeypatch):
    if in_main:
        as_in_main(monkeypatch, function, *MINE)
    assert written(function, tmp_path)(**arguments) == function(**arguments)
    assert function(**arguments) == pytest.approx(wanted)


def test_a_coroutine_function_stays_one(tmp_path):
    found = written(waits, tmp_path)
    assert asyncio.run(found([], "")) == 1.0


def reads_xml(completion, answer):
    return float(xml.etree.ElementTree.fromstring(completion).tag == trees.ElementTree.fromstring(completion).tag)


def dates(completion, answer):
    return float(email.utils.parsedate(completion) is None and concurrent.futures.Future().done() is False)


@pytest.mark.parametrize("function", [reads_xml, dates])
def test_modules_inside_a_package_are_imported_too(function, tmp_path):
    (tmp_path / "reward.py").write_text(f"{module_of(function)}\nprint(reward_fn('<a/>', ''))\n")
    done = subprocess.run([sys.executable, "-I", str(tmp_path / "reward.py")], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr


def test_the_written_module_stands_alone(tmp_path, monkeypatch):
    as_in_main(monkeypatch, uses_modules, helped, *MINE)
    for number, function in enumerate((uses_modules, helped)):
        (tmp_path / f"{number}.py").write_text(module_of(function))
        done = subprocess.run([sys.executable, "-I", str(tmp_path / f"{number}.py")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def uses_an_object(completion, answer):
    return JUDGE(completion, answer)


def uses_a_file(completion, answer):
    return len(OPEN.name)


def uses_a_class(completion, answer):
    return Judge()(completion, answer)


def uses_nothing_known(completion, answer):
    return undefined_name(completion)  # noqa: F821


def uses_a_bad_helper(completion, answer):
    return uses_an_object(completion, answer)


def counting() -> FunctionType:
    number = 0

    def counted(completion, answer):
        nonlocal number
        number += 1
        return number
    return counted


def with_a_helper_named(name: str) -> FunctionType:
    """A reward of another name: in its file both would be the reward."""
    source = f"def scored(completion, answer):\n    return {name}([], completion)\n"
    file = Path(tempfile.mkdtemp()) / "scored.py"
    file.write_text(source)
    space: dict[str, Any] = {name: reward_fn, "__name__": "__main__"}
    exec(compile(source, str(file), "exec"), space)
    return space["scored"]


def from_exec() -> FunctionType:
    space: dict[str, Any] = {}
    exec("def typed(completion, answer):\n    return 1.0", space)
    return space["typed"]


@pytest.mark.parametrize(("function", "why"), [
    (lambda completion, answer: 1.0, "is a lambda: define a function with `def`"),
    (Judge().score, "is a method of a Judge"), (JUDGE, "is a Judge"), (Judge, "is the class Judge"),
    (len, "built into Python"), (functools.partial(reward_fn, answer="1"), "is a partial"),
    (uses_an_object, "it uses `JUDGE`, and a Judge cannot be written"),
    (uses_a_file, "it uses `OPEN`, and a TextIOWrapper cannot be written"),
    (uses_a_class, "it uses `Judge`, and the class Judge cannot be written"),
    (uses_nothing_known, "it uses `undefined_name`, and it is not defined"),
    (uses_a_bad_helper, "its function uses_an_object uses `JUDGE`, and a Judge"),
    (made(JUDGE), "it uses `weight`, and a Judge"),
    (badly_decorated, "badly_decorated has a decorator without functools.wraps"),
    (counting(), "counted cannot stand alone (no binding for nonlocal 'number' found)"),
    *((with_a_helper_named(name), f"it uses `{name}`, and in a file the reward itself has") for name in REWARD_NAMES),
    (from_exec(), "the source of typed cannot be read"),
    (7, "is a int"),
])
def test_what_cannot_be_written_is_named_with_a_remedy(function, why, monkeypatch):
    as_in_main(monkeypatch, Judge, *(one for one in (function, uses_an_object) if isinstance(one, FunctionType)))
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        module_of(function)
    assert 'reward="my_reward.py"' in str(caught.value) and "\n" not in str(caught.value)


def test_a_module_of_the_users_own_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "my_helpers.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_helpers

    def reward(completion, answer):
        return my_helpers.double(len(completion))

    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "reward.py"
    file.write_text(module_of(reward) + "\nprint(reward('abc', ''))\n")
    done = subprocess.run([sys.executable, "-P", str(file)], capture_output=True, text=True, cwd="/")
    assert done.stdout == "6\n", done.stderr
