"""Samples in a report: which are shown, how tokens are colored, and that nothing a model says becomes markup."""

import json
import re

import pytest

from streamrl.metrics.samples import Sample, SampleTokens, Turn
from streamrl.report.report import write_report
from streamrl.report.samples import (
    MAX_CHARACTERS,
    MAX_TOKENS,
    card,
    evaluations,
    phases,
    pick,
    said,
    samples_html,
    shade,
)


def sample(step=1, reward=0.5, **fields):
    given = {"kind": "train", "version": 0, "lag": 1, "prompt": "2+2?", "answer": "4", "score": reward, "num_tokens": 2,
             "group": 0, "member": 0, "record": 0}
    return Sample(**{**given, "step": step, "reward": reward, **fields})


def test_the_first_and_the_last_third_show_best_worst_and_random():
    samples = [sample(step, reward=(step * 7 % 30) / 30) for step in range(1, 31)]

    (first_title, first), (last_title, last) = phases(samples)

    assert first_title == "Training, steps 1 to 10" and last_title == "Training, steps 21 to 30"
    for picked, steps in ((first, range(1, 11)), (last, range(21, 31))):
        assert [label for label, _ in picked] == ["best", "worst", "random", "random"]
        rewards = [one.reward for one in samples if one.step in steps]
        assert picked[0][1].reward == max(rewards) and picked[1][1].reward == min(rewards)
        assert len({id(one) for _, one in picked}) == 4 and all(one.step in steps for _, one in picked)
    assert phases(samples) == phases(list(samples)), "always the same"


def test_a_run_of_two_steps_has_one_phase_and_one_sample_is_not_shown_twice():
    assert [title for title, _ in phases([sample(1), sample(2)])] == ["Training, steps 1 to 2"]
    assert [label for label, _ in pick([sample()])] == ["best"]
    assert samples_html([]) == ""


def test_evaluations_pair_the_same_prompt_first_and_last():
    found = [sample(step, kind="eval", record=record, dataset="") for step in (0, 40, 80) for record in (3, 5)]

    ((title, picked),) = evaluations(found)

    assert title == "Evaluation, the first and the last"
    assert [(label, one.record) for label, one in picked] == [("version 0", 3), ("version 80", 3), ("version 0", 5),
                                                              ("version 80", 5)]


@pytest.mark.parametrize(("ratio", "expected"), [
    (1.0, ""), (1.04, ""), (1.1, "h1"), (1.4, "h2"), (2.0, "h3"), (9.0, "h4"), (0.9, "l1"), (0.1, "l4"), (None, ""),
    (0.0, ""), (float("nan"), "")])
def test_the_shade_of_a_token_follows_its_log_ratio(ratio, expected):
    assert shade(ratio) == expected


def test_tokens_are_marked_with_ratio_and_version_and_plain_ones_are_joined():
    tokens = SampleTokens(ids=[1, 2, 3, 4, 5], texts=["a", "b", "<c>", " ok", "d"], ratios=[1.0, 1.0, 2.0, None, 0.5],
                          versions=[7, 7, 7, -1, 8])

    assert said(sample(tokens=tokens, num_tokens=5)) == (
        'ab<mark class="h3" title="ratio 2, version 7">&lt;c&gt;</mark><span class="observed"> ok</span>'
        '<mark class="l3" title="ratio 0.5, version 8">d</mark>')


def test_long_texts_are_cut_and_say_so():
    tokens = SampleTokens(ids=[1] * 900, texts=["x"] * 900, ratios=[1.0] * 900, versions=[0] * 900)

    assert said(sample(tokens=tokens, num_tokens=1000)).endswith(f"… and {900 - MAX_TOKENS} more tokens</span>")
    assert f"… and {9000 - MAX_CHARACTERS} more characters" in said(sample(answer="y" * 9000))


def test_turns_tell_the_model_from_the_environment():
    turns = [Turn("assistant", "call <tool>"), Turn("environment", "42")]

    assert said(sample(messages=turns)) == (
        '<span class="spoken">call &lt;tool&gt;</span>\n<span class="observed">42</span>')


def test_a_rewritten_history_interrupts_the_tokens_where_it_was_read():
    turns = [Turn("assistant", "ab"), Turn("context", "<user> b"), Turn("assistant", "c")]
    tokens = SampleTokens([1, 2, 3], ["a", "b", "c"], [1.0, 1.0, 1.0], [4, 4, 4], [2])

    assert said(sample(messages=turns, tokens=tokens)) == (
        'ab<div class="observed">history rewritten:\n&lt;user&gt; b</div>c'
    )
    assert said(sample(messages=turns)).count('class="observed"') == 1


def test_nothing_that_a_model_says_becomes_markup(make_run):
    evil = '</div><script>alert("x")</script><img src=x onerror=alert(1)>"\'&<!--trail-->\u202e\x00'
    root = make_run()
    tokens = {"ids": [1], "texts": [evil], "ratios": [3.0], "versions": [1]}
    line = {"kind": "train", "step": 1, "version": 0, "lag": 0, "prompt": evil, "answer": evil, "reward": 1.0,
            "score": 0.0, "num_tokens": 1, "group": 0, "member": 0, "record": 0, "fate": evil, "dataset": evil,
            "parts": {evil: 1.0}}
    (root / "samples.jsonl").write_text(json.dumps({**line, "tokens": tokens}) + "\n" + json.dumps(line) + "\n")

    text = write_report(root).read_text(encoding="utf-8")

    assert text.count("<script") == 1 and "<img" not in text and text.count("<!--trail-->") == 1
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in text
    assert not re.search(r'title="[^"]*onerror', text)


def test_a_damaged_file_of_samples_hides_nothing_else(make_run):
    root = make_run()
    (root / "samples.jsonl").write_text("{broken\n")

    text = write_report(root).read_text(encoding="utf-8")

    assert "samples.jsonl:1" in text and "Evaluation score" in text


def test_a_card_shows_the_right_answer_as_text():
    assert '<div class="said prompt">expected: 1 &lt; 2</div>' in card("best", sample(expected="1 < 2"))
    assert "expected" not in card("best", sample())
