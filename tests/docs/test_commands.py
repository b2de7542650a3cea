"""Every command of the pages has a rule of `make docs-test`, and the tool runs, skips and fails as it says."""

import os
from pathlib import Path

import pytest

from streamrl.config.overrides import check_names
from tests.docs.extract import Item, all_items, extract
from tests.docs.rules import Rule, misses_its_gain, read_rules, rule_for
from tests.docs.run import Reader, main, table
from tests.docs.terminal import NOT_LEARNED, Outcome

ITEMS = [item for item in all_items() if item.kind != "file"]
RULES = read_rules()


def test_every_command_of_the_pages_has_a_rule():
    missing = []
    for item in ITEMS:
        try:
            rule_for(item, RULES)
        except LookupError as error:
            missing.append(str(error))

    assert not missing, "\n".join(missing)


def test_every_rule_has_a_command():
    decides = [next((rule for rule in RULES if rule.fits(item)), None) for item in ITEMS]

    assert [rule.match for rule in RULES if rule not in decides] == []


def test_every_command_that_trains_ends_above_its_start_or_its_rule_says_why_not():
    assert [wrong for item in ITEMS if (wrong := misses_its_gain(item, rule_for(item, RULES)))] == []


@pytest.mark.parametrize(
    ("rule", "score", "status"),
    [(Rule("", learns=True), 0.75, 0), (Rule("", learns=True), 0.25, NOT_LEARNED),
     (Rule("", no_gain="three steps"), 0.25, 0)],
)
def test_a_run_that_must_learn_is_judged_by_its_summary(tmp_path: Path, rule: Rule, score: float, status: int):
    page = tmp_path / "page.md"
    run = f'mkdir -p runs/a && echo \'{{"eval_score_first": 0.25, "eval_score_last": {score}}}\' > runs/a/summary.json'
    page.write_text(f"```sh\n{run}\n```\n")
    (tmp_path / "clone").mkdir()
    reader = Reader(tmp_path / "clone", [rule])

    reader.follow(extract(page, "page.md"))

    (outcome,) = reader.outcomes
    assert outcome.status == status and f"evaluation 0.25 -> {score}" in outcome.row()
    assert rule.no_gain in outcome.note


def test_a_run_with_nothing_but_blank_answers_has_failed_and_a_rule_without_a_word_on_its_gain_is_wrong():
    done = Outcome("p:1", "streamrl launch", 0)
    runs = [({"eval_score_first": 0.0, "eval_score_last": 0.1}, ["", "\n", " "])]

    assert done.with_scores(runs, must_rise=False).status == NOT_LEARNED
    assert done.with_scores([(runs[0][0], ["", "7"])], must_rise=True).status == 0
    assert done.with_scores([], must_rise=True).failed
    trains, asks = Item("p", 1, "shell", "streamrl launch a=1"), Item("p", 1, "shell", "streamrl eval x")
    assert misses_its_gain(trains, Rule("")) and misses_its_gain(asks, Rule("", learns=True))


def test_what_is_appended_names_real_settings():
    for rule in RULES:
        check_names(rule.append.split())


def test_a_page_is_read_in_order(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text with `streamrl settings lr`.\n\n```python\n# my.py\nx = 1\n```\n\n"
        "    streamrl launch a=1 \\\n        b=2     # why\n\n"
        "```\nmake quickstart\nstep 3/3  reward 0.9\n```\n"
        '```bash title="ignored"\nany --command\n```\n```yaml title="my.yaml"\na: 1\n```\n'
        "```console\n$ streamrl report\nname at least one\n```\n```python\nprint(1)\n```\n"
    )

    found = [(item.kind, item.name or item.text) for item in extract(page, "page.md")]

    assert found == [
        ("shell", "streamrl settings lr"), ("file", "my.py"), ("shell", "streamrl launch a=1 b=2"),
        ("shell", "make quickstart"), ("shell", "any --command"), ("file", "my.yaml"), ("shell", "streamrl report"),
        ("python", "print(1)\n"),
    ]
    assert [item.line for item in extract(page, "page.md")] == [1, 4, 8, 12, 16, 19, 22, 26]


def test_commands_run_in_order_or_beside_each_other_and_every_end_is_listed(tmp_path: Path):
    clone = tmp_path / "clone"
    clone.mkdir()
    os.mkfifo(clone / "pipe")
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ncat pipe > read\necho written > pipe\n```\n"  # each blocks without the other
        '```python\n# a.py\nprint("made", open("read").read())\n```\n'
        "```sh\npython3 a.py | grep 'made written'\npython3 a.py | grep 'made written'\nno\nfalse\n```\n\n"
        "```python\nraise SystemExit(3)\n```\n"
    )
    rules = [Rule("cat pipe", terminal="learner", timeout_s=30), Rule("> pipe", terminal="actor", timeout_s=30),
             Rule("^no$", skip="not a command"), Rule("", timeout_s=30)]
    reader = Reader(clone, rules)

    reader.follow(extract(page, "page.md"))

    assert [(outcome.where, outcome.status, outcome.note) for outcome in reader.outcomes] == [
        ("page.md:2", 0, ""), ("page.md:3", 0, ""), ("page.md:10", 0, ""), ("page.md:11", None, "as at page.md:10"),
        ("page.md:12", None, "not run: not a command"), ("page.md:13", 1, ""), ("page.md:17", 3, ""),
    ]
    lines = table(reader.outcomes).splitlines()
    assert lines[-1].startswith("7 commands: 3 ran and succeeded, 2 failed, 2 not run")
    assert "page.md:12; not run: not a command" in "\n".join(lines)


def test_the_list_says_how_each_command_would_be_run(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(ITEMS)
    assert any("two_machines.md:" in line and "not run: needs a second machine" in line for line in lines)
