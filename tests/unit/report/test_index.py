"""The index of a folder of runs, and the links between their reports."""

import json
import os
import re
import shutil

import pytest

from streamrl.cli import main
from streamrl.report.index import sparkline, write_index
from streamrl.report.report import write_report


@pytest.fixture
def runs(make_run, tmp_path):
    """Two single runs, the second of them killed, and a sweep of two."""
    root = tmp_path / "runs"
    for name, began, finished in (("a-001", "2026-01-01", True), ("a-002", "2026-01-02", False),
                                  ("sweep-1/0-x", "2026-01-03", True), ("sweep-1/1-y", "2026-01-04", True)):
        made = make_run("made", finished=finished)
        (made / "run.json").write_text(json.dumps({"starts": [{"started": f"{began}T00:00:00+00:00"}]}))
        shutil.move(made, root / name)
    (root / "sweep-1" / "comparison.html").write_text("")
    return root


def links(path):
    return dict(reversed(pair) for pair in re.findall(r'<a href="([^"#]*)">([^<]*)</a>', path.read_text()))


def test_the_index_lists_every_run_newest_first_and_sweeps_together(runs):
    text = write_index(runs, reports=True).read_text()

    places = [text.index(f">{name}</a>") for name in ("a-002", "a-001", "0-x", "1-y")]
    assert places == sorted(places)
    assert "4 runs" in text and "<h2>sweep-1 · " in text and text.count('class="badge killed"') == 1
    assert text.count("0.05 → 0.5") == 4 and text.count("<svg viewBox") == 4


def test_every_link_of_the_index_and_the_reports_leads_somewhere(runs, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["streamrl", "report", str(runs)])
    assert main() == 0
    index = runs / "index.html"
    assert capsys.readouterr().out.strip() == str(index)

    assert links(index)["a-001"] == "a-001/report.html" and links(index)["comparison"] == "sweep-1/comparison.html"
    reports = sorted(runs.glob("**/report.html"))
    assert len(reports) == 4
    for page in (index, *reports):
        assert all((page.parent / target).exists() for target in links(page).values())
    first, second = runs / "a-001" / "report.html", runs / "a-002" / "report.html"
    assert links(first) == {"all runs": "../index.html", "a-002 →": "../a-002/report.html"}
    assert links(second) == {"all runs": "../index.html", "← a-001": "../a-001/report.html"}
    assert links(runs / "sweep-1/0-x/report.html") == {
        "all runs": "../../index.html", "comparison": "../comparison.html", "1-y →": "../1-y/report.html"}


def test_only_missing_and_outdated_reports_are_written_again(runs):
    write_index(runs, reports=True)
    first, second = runs / "a-001", runs / "a-002"
    before = {run: (run / "report.html").read_text() for run in (first, second)}
    with (second / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "reward/mean": 0.5}\n')
    later = (second / "report.html").stat().st_mtime + 10
    os.utime(second / "metrics.jsonl", (later, later))

    write_index(runs, reports=True)

    assert (first / "report.html").read_text() == before[first]
    assert "ended at step 11" in (second / "report.html").read_text()


def test_without_reports_the_index_names_runs_that_have_none_and_hidden_folders_are_no_runs(runs, tmp_path):
    text = write_index(runs).read_text()

    assert "a-001" in text and not list(runs.glob("**/report.html"))
    assert "<a href" not in text.replace('<a href="sweep-1/comparison.html">', "")
    shutil.move(runs, tmp_path / ".trash")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        write_index(tmp_path)


def test_a_new_report_keeps_its_links(runs):
    write_index(runs, reports=True)
    report = runs / "a-001" / "report.html"
    before = links(report)
    write_report(runs / "a-001")
    assert links(report) == {}

    write_index(runs)

    assert links(report) == before


def test_names_with_special_characters_are_quoted(make_run, tmp_path):
    make_run('a "b" <c>')

    index = write_index(tmp_path, reports=True)

    assert links(index) == {"a &quot;b&quot; &lt;c&gt;": "a%20%22b%22%20%3Cc%3E/report.html"}


def test_a_run_that_failed_before_its_first_step_is_listed_with_a_report_of_its_cause(tmp_path):
    (tmp_path / "0-x").mkdir()
    (tmp_path / "0-x" / "failure.txt").write_text("status 1: no <memory>\n")

    text = write_index(tmp_path, reports=True).read_text()

    assert 'class="badge failed"' in text
    assert "status 1: no &lt;memory&gt;" in (tmp_path / "0-x" / "report.html").read_text()


def test_a_sparkline_spans_its_box_and_needs_two_values():
    assert sparkline([1.0]) == ""
    path = re.search(r'd="M([^"]*)"', sparkline([0, 5, 10])).group(1)
    assert [tuple(map(float, point.split(","))) for point in path.split("L")] == [(2, 23), (64, 13), (126, 3)]
