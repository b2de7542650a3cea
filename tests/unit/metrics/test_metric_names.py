"""The list of metrics: complete, closed, and equal to its page."""

import re
from pathlib import Path

import pytest

from streamrl.metrics.names import METRICS, Reduction, lookup, markdown_page, member

ROOT = Path(__file__).parents[3]


def test_an_unknown_key_is_refused_with_the_file_to_edit():
    with pytest.raises(KeyError, match=r"policy/losss.*names\.py"):
        lookup("policy/losss")


def test_every_key_of_the_algorithms_plan_is_in_the_list():
    planned = """
        ess/token ess/sequence ess/sequence_clipped ess/kept_fraction ratio/mean_token ratio/mean_sequence ratio/max
        ratio/share_truncated ratio/share_at_bound drift/m2 drift/k1 drift/k3 drift/mismatch drift/exponent
        drift/oscillation drift/m2_by_lag lag/head_mean lag/head_max lag/token_mean lag/token_max lag/span lag/queue
        lag/flight lag/group_spread lag/head lag/token lag/head_groups keep/veto keep/opsm keep/rejected keep/lag
        clip/positive clip/negative trace/length trace/fraction lr/scale control/eta control/max_lag control/mode
        kl/value kl/coef kl/clamped_fraction entropy/mean entropy/coef constraint/entropy reward/mean reward/std
        advantage/mean advantage/std group/zero_std_fraction length/consumed length/dispatched
        length/truncated_fraction critic/loss critic/explained_variance critic/grad_norm policy/grad_norm
        dropped/stale dropped/version dropped/zero_std dropped/accuracy dropped/overlong dropped/nonfinite_logprob
        dropped/duplicate dropped/cancelled
    """.split()

    missing = [key for key in planned if key not in METRICS and not lookup(key).key.endswith("/*")]

    assert missing == []


def test_no_key_is_listed_twice_and_each_has_a_unit_and_a_sentence():
    page_keys = re.findall(r"^\| `([^`]+)` \|", markdown_page(), flags=re.M)

    assert len(page_keys) == len(set(page_keys)) == len(METRICS)
    assert [m.key for m in METRICS.values() if not m.unit or not m.meaning.endswith(".")] == []


def test_a_listed_key_wins_over_its_family_and_others_fall_into_it():
    assert lookup("reward/std").reduction is Reduction.std
    assert lookup("reward/format").key == "reward/*"
    assert lookup("shadow/grpo/cosine_by_lag").reduction is lookup("shadow/cosine_by_lag").reduction


@pytest.mark.parametrize("key", ["reward/", "reward/a b", "reward/a/b", "reward", "", "policy/*x"])
def test_a_malformed_member_of_a_family_is_unknown(key):
    with pytest.raises(KeyError):
        lookup(key)


@pytest.mark.parametrize("name", ["format ok", "größe", "a/b", "x" * 200, ""])
def test_any_text_from_a_task_becomes_a_key_that_can_be_logged(name):
    assert lookup(member("reward", name)).key == "reward/*"


def test_only_real_families_have_members():
    with pytest.raises(KeyError, match="not a family of metrics; there are: reward"):
        member("policy", "loss")


def test_the_page_has_a_row_for_every_metric():
    page = markdown_page()

    assert [key for key in METRICS if f"\n| `{key}` | " not in page] == []
    assert page.startswith("# All metrics\n") and page.endswith(" |\n")
