"""Every command of the pages has a rule of `make docs-test`, and the tool runs, skips and fails as it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.config.load import check_overrides
from tests.docs.extract import ROOT, Item, all_items, extract
from tests.docs.rules import Rule, full_text, misses_its_gain, read_rules, rule_for
from tests.docs.run import Ports, Reader, main, selected, table
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
    ("text", "rule", "wrong"),
    [
        ("streamrl launch a=1", Rule(""), True), ("streamrl launch a=1", Rule("", learns=True), False),
        ("streamrl learner a=1", Rule("", no_gain="short"), False), ("make quickstart", Rule(""), True),
        ("streamrl launch a=1", Rule("", learns=True, no_gain="short"), True),
        ("streamrl launch a=1", Rule("", skip="a cluster"), False), ("streamrl eval x", Rule(""), False),
        ("streamrl eval x", Rule("", learns=True), True), ("import streamrl\nstreamrl.train('x')", Rule(""), True),
    ],
)
def test_a_rule_says_what_a_training_command_comes_to(text: str, rule: Rule, wrong: bool):
    assert bool(misses_its_gain(Item("p", 1, "shell", text), rule)) is wrong


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


def test_a_run_with_nothing_but_blank_answers_has_failed():
    done = Outcome("p:1", "streamrl launch", 0)
    runs = [({"eval_score_first": 0.0, "eval_score_last": 0.1}, ["", "\n", " "])]

    assert done.with_scores(runs, must_rise=False).status == NOT_LEARNED
    assert done.with_scores([(runs[0][0], ["", "7"])], must_rise=True).status == 0
    assert done.with_scores([], must_rise=True).failed


def test_what_is_appended_names_real_settings():
    for rule in RULES:
        check_overrides(rule.append.split())


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


def test_a_command_without_a_rule_is_an_error_that_names_its_place():
    with pytest.raises(LookupError, match="README.md:7: `rm -r x` has no rule"):
        rule_for(Item("README.md", 7, "shell", "rm -r x"), RULES)


def test_the_end_of_an_unfinished_command_is_the_rules():
    assert full_text(Item("p", 1, "shell", "launch a=1 ..."), Rule("", append="b=2")) == "launch a=1 b=2"


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


def test_a_command_past_its_time_is_killed_with_its_children_and_has_failed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```sh\n(exec > held; sleep 600) | cat\n```\n")
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(held, True)
    reader = Reader(tmp_path, [Rule("", timeout_s=2)])

    reader.follow(extract(page, "page.md"))

    assert reader.outcomes[0].failed and "timeout" in reader.outcomes[0].row()
    assert os.read(held, 1) == b""  # the end of the file: no process holds it open
    os.close(held)


def test_a_port_of_the_pages_is_the_same_free_one_everywhere():
    ports = Ports()

    first, second = (ports.replace(f"--at 127.0.0.1:{port}") for port in ("5601", "5602"))

    assert first != second and "5601" not in first
    assert ports.replace("tcp://127.0.0.1:5601,x") == first.replace("--at ", "tcp://") + ",x"


def test_some_commands_come_with_the_files_of_their_pages():
    file, run = Item("a.md", 1, "file", "x = 1\n", "a.py"), Item("a.md", 5, "shell", "python a.py")
    other, make = Item("b.md", 1, "file", "x = 2\n", "a.py"), Item("b.md", 5, "shell", "make it")

    assert selected([file, run, other, make], "a.py") == [file, run]
    assert selected([file, run, other, make], "b.md") == [other, make]
    assert selected([file, run, other, make], "") == [file, run, other, make]


def test_the_list_says_how_each_command_would_be_run(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(ITEMS)
    assert any("two_machines.md:" in line and "not run: needs a second machine" in line for line in lines)


def test_the_make_target_starts_it():
    assert "-m tests.docs.run" in (ROOT / "Makefile").read_text()
