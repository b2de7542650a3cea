"""The list of metrics: complete, closed, and equal to its page."""

import re
from pathlib import Path

import pytest

from streamrl.metrics.names import METRICS, Reduction, lookup, markdown_page, member

ROOT = Path(__file__).parents[3]


def test_no_key_is_listed_twice_and_each_has_a_unit_and_a_sentence():
    page_keys = re.findall(r"^\| `([^`]+)` \|", markdown_page(), flags=re.M)

    assert len(page_keys) == len(set(page_keys)) and set(page_keys) == set(METRICS)
    assert markdown_page().startswith("# All metrics\n") and markdown_page().endswith(" |\n")
    assert [m.key for m in METRICS.values() if not m.unit or not m.meaning.endswith(".")] == []


def test_a_listed_key_wins_over_its_family_and_others_fall_into_it():
    assert lookup("reward/std").reduction is Reduction.std
    assert lookup("reward/format").key == "reward/*"
    assert lookup("shadow/grpo/cosine_by_lag").reduction is lookup("shadow/cosine_by_lag").reduction


@pytest.mark.parametrize("key", ["reward/", "reward/a b", "reward/a/b", "reward", "", "policy/*x"])
def test_a_malformed_member_of_a_family_is_unknown(key):
    with pytest.raises(KeyError, match=r"Unknown metric.*names\.py"):
        lookup(key)
    with pytest.raises(KeyError, match="not a family of metrics; choose from reward"):
        member("policy", "loss")


@pytest.mark.parametrize("name", ["format ok", "größe", "a/b", "x" * 200, ""])
def test_any_text_from_a_task_becomes_a_key_that_can_be_logged(name):
    assert lookup(member("reward", name)).key == "reward/*"
