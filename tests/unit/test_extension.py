"""Names of settings become objects."""

from __future__ import annotations

import pytest

from streamrl.errors import ConfigError
from streamrl.extension import resolve

TABLE = {"ppo_clip": 1, "cispo": 2}


def test_an_entry_of_the_table_is_found_by_its_name():
    assert resolve("cispo", TABLE, setting="loss.surrogate") == 2


def test_a_users_own_is_found_by_its_module_and_attribute():
    assert resolve("math:pi", TABLE, setting="loss.surrogate") == pytest.approx(3.14159, abs=1e-5)


@pytest.mark.parametrize(("name", "says"), [
    ("ppo_clop", r"loss\.surrogate=ppo_clop is unknown\. Did you mean ppo_clip\?"),
    ("zzz", r"Choose from cispo, ppo_clip, or name your own as package\.module:attribute"),
    ("no_such_module_here:f", r"cannot import 'no_such_module_here'"),
    ("math.py:pi", r"write loss\.surrogate=math:pi"),
    ("own/clips.py:", r"write loss\.surrogate=own\.clips:NAME"),
    ("math:pie", r"module math has no 'pie'\. Did you mean pi\?"),
])
def test_what_is_missing_is_named_with_the_nearest(name, says):
    with pytest.raises(ConfigError, match=says):
        resolve(name, TABLE, setting="loss.surrogate")
