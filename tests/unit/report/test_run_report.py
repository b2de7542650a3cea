"""The report as a document: self-contained, well-formed, and about this run."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from streamrl.cli import main
from streamrl.report.compare import terminal_table, write_comparison
from streamrl.report.report import write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Outline(HTMLParser):
    """Titles of the charts, text, and whether every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.captions, self.tags, self.text = [], [], set(), ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)


def test_the_report_needs_nothing_but_itself(make_run):
    text = write_report(make_run()).read_text(encoding="utf-8")

    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"url\(|@import|\bsrc=", text)
    assert all(href.startswith("#") for href in re.findall(r'\bhref="([^"]*)"', text))
    assert not {"link", "img", "iframe"} & Outline(text).tags
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text, "only the page's own may run"


def test_the_report_shows_what_was_measured_and_nothing_else(make_run):
    text = write_report(make_run()).read_text(encoding="utf-8")
    outline = Outline(text)

    assert re.findall(r'data-bin="(\d+)" data-count="(\d+)"', text) == [("0", "400"), ("2", "600")], "every token"
    (dots,) = re.findall(r'class="dots c0" data-run="0" data-x="([^"]*)" data-y="([^"]*)"', text)
    assert dots == ("1,10", "0.05,0.5")
    assert outline.captions == [
        "Evaluation score", "Reward", "Lag of the trained tokens", "Trained tokens by lag, whole run",
        "Groups not trained on (whole run)", "Throughput", "Where the learner's time went (whole run)",
    ]
    assert "from 0.05; best 0.5 at step 10" in outline.text
    assert "surrogate: ppo_clip  # <b>" in outline.text


def test_shadow_algorithms_have_a_chart_of_cosines_and_one_of_norms(make_run):
    root = make_run()
    found = {"shadow/cosine": 1.0, "shadow/grad_norm": 0.5, "shadow/vespo/cosine": 0.7, "shadow/vespo/grad_norm": 0.2}
    rows = [json.loads(line) | found for line in (root / "metrics.jsonl").read_text().splitlines()]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outline = Outline(write_report(root).read_text(encoding="utf-8"))

    charts = [caption for caption in outline.captions if caption.startswith("Shadow")]
    assert charts == [
        "Shadow algorithms: cosine to the gradient in use", "Shadow algorithms: norm of the gradient by log-probs"
    ]
    assert "vespo" in outline.text and "in use" in outline.text


def test_a_killed_run_has_a_report_too(make_run):
    root = make_run(finished=False)
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "rew')

    outline = Outline(write_report(root).read_text(encoding="utf-8"))

    assert "ended without a summary" in outline.text and "The run ended at step 10" in outline.text
    assert "Lag of the trained tokens" in outline.captions


def test_a_directory_that_is_not_a_run_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist"):
        write_report(tmp_path)


def test_a_comparison_overlays_the_runs_labeled_by_the_overrides_that_differ(make_run):
    runs = [make_run(f"run-{eta}", lag=eta, overrides=["env.name=string.reverse", f"staleness.eta={eta}"])
            for eta in (1, 2, 3)]

    out = runs[0].parent / "comparison.html"
    printed = write_comparison(runs, out)

    table = out.with_suffix(".md").read_text()
    assert "| eta=1 |" in printed and "eval first" in table and "eval first" not in printed  # equal in all
    outline = Outline(out.read_text(encoding="utf-8"))
    assert outline.captions == ["Evaluation score", "Reward", "Mean token lag", "Largest head lag", "Trained",
                                "Generated"]
    charts = out.read_text(encoding="utf-8").split("<figure")[1:]
    curves = [re.findall(r'<path class="curve c(\d)" data-name="[^"]*" data-run="(\d)"', chart) for chart in charts]
    assert curves == [[("0", "0"), ("1", "1"), ("2", "2")]] * 6
    assert out.read_text().count('<div class="runs">') == 1 and '<div class="legend">' not in out.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert [row[0] for row in rows] == ["run", rows[1][0], "staleness.eta=1", "staleness.eta=2", "staleness.eta=3"]
    assert [row[rows[0].index("lag max")] for row in rows[2:]] == ["1", "2", "3"]
    assert [row[rows[0].index("eval last")] for row in rows[2:]] == ["0.5"] * 3


def test_runs_without_differing_overrides_are_labeled_by_directory_and_the_table_lines_up(make_run, tmp_path):
    runs = [make_run("a"), make_run("b", finished=False), make_run("c | d")]
    printed = write_comparison(runs, tmp_path / "comparison.html").splitlines()

    table = (tmp_path / "comparison.md").read_text()
    assert "| a " in table and r"c \| d" in table and len({len(line) for line in printed}) == 1
    assert re.search(r"\| b \(unfinished\) +\| +0.05 \| +0.5 \| +10 \| +- \|", table)


def test_runs_are_ranked_by_their_last_evaluation_with_steps_and_lag_beside_it(make_run, tmp_path, monkeypatch):
    runs = [make_run(name, lag=lag) for name, lag in (("low", 1), ("high", 2), ("middle", 3))]
    for run, score in zip(runs, (0.25, 0.75, 0.5), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            row = {"step": 10, "eval/score": score, "eval/score_stderr": 0.125, "eval/hard/score": score / 2}
            file.write(json.dumps(row) + "\n")
        summary = run / "summary.json"
        summary.write_text(re.sub(r'"eval_score_last": [0-9.]+', f'"eval_score_last": {score}', summary.read_text()))

    monkeypatch.setattr(sys, "argv", ["streamrl", "report", *map(str, runs)])
    assert main() == 0
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                      for line in (tmp_path / "comparison.md").read_text().splitlines()]
    assert head[:7] == ["run", "eval first", "eval last", "eval hard", "steps", "lag mean", "lag max"]
    assert [[row[0], *row[2:5], row[6]] for row in rows] == [
        ["high", "0.75 ± 0.1", "0.375", "10", "2"], ["middle", "0.5 ± 0.1", "0.25", "10", "3"],
        ["low", "0.25 ± 0.1", "0.125", "10", "1"],
    ]
    page = (tmp_path / "comparison.html").read_text()
    assert re.findall(r'class="best">([^<]*)', page) == ["0.75 ± 0.1"]


def test_a_score_whose_line_is_torn_has_the_error_of_the_summary_not_of_the_score_before(make_run, tmp_path):
    run, summary = make_run("torn"), tmp_path / "torn" / "summary.json"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "eval/score": 0.25, "eval/score_stderr": 0.5}\n{"step": 10, "eval/sco')
    summary.write_text(json.dumps(
        {**json.loads(summary.read_text()), "eval_score_last": 0.75, "eval_stderr_last": 0.03125}
    ))

    assert "0.75 ± 0.03" in write_comparison([run], tmp_path / "comparison.html")


LONG_LABELS = [f"policy.optimizer.lr=0.000{n}6934728123456, staleness.eta={n}" for n in range(1, 5)]
WIDE = ["eval hard", "steps", "lag mean", "lag max", "wall", "trained tok/s", "generated tok/s", "learner waits"]


@pytest.mark.parametrize("kept", [("eval last",), ("eval last", "kl/mean")])
@pytest.mark.parametrize("labels", [LONG_LABELS, ["a", "b"], ["only one"], [f"{'x' * 90}{n}" for n in range(3)],
                                    [f"{n}{'x' * 90}" for n in range(3)], ["a.lr=0.10000001", "a.lr=0.10000002"]])
def test_a_terminal_gets_the_table_in_80_columns_with_what_ranks_the_runs(labels, kept):
    head = ["run", "kl/mean", "eval first", "eval last", *WIDE]
    rows = [head, *([label, f"{n}.5", "0.1", f"0.{n} ± 0.05", *[f"{n}00.5k"] * 8] for n, label in enumerate(labels))]

    first, _, *lines = terminal_table(rows, kept).splitlines()

    found = [cell.strip() for cell in first.split("|")[1:-1]]
    own = [line.split("|")[1].strip() for line in lines]
    assert len(first) <= 80, first
    assert found[0] == "run" and set(kept) <= set(found) and len(set(own)) == len(labels)
    assert ("eval first" in found) == (len(labels) == 1)
    if labels is LONG_LABELS:
        assert own[0] == "lr=0.000169, eta=1" and "steps" in found


def test_the_best_last_evaluation_is_marked_unless_all_are_equal(make_run, tmp_path):
    runs = [make_run("a"), make_run("b"), make_run("c")]
    write_comparison(runs, tmp_path / "equal.html")
    summary = runs[1] / "summary.json"
    summary.write_text(summary.read_text().replace('"eval_score_last": 0.5', '"eval_score_last": 0.75'))
    write_comparison(runs, tmp_path / "different.html")

    assert 'class="best"' not in (tmp_path / "equal.html").read_text()
    assert re.findall(r'class="best">([^<]*)', (tmp_path / "different.html").read_text()) == ["0.75"]


def test_settings_that_differ_are_listed_and_those_that_always_do_are_not(make_run, tmp_path):
    runs = [make_run("a"), make_run("b")]
    for i, run in enumerate(runs):
        (run / "config.json").write_text(json.dumps({
            "run": {"dir": str(run)}, "loss": {"surrogate": ["cispo", "<gspo>"][i]}, "env": {"name": "same"}}))

    write_comparison(runs, tmp_path / "comparison.html")

    text = (tmp_path / "comparison.html").read_text()
    (table,) = re.findall(r'id="settings".*?<tbody>(.*?)</tbody>', text, re.S)
    assert table == ("<tr><td><code>loss.surrogate</code></td><td>cispo</td><td>&lt;gspo&gt;</td></tr>")


def test_what_went_wrong_in_a_run_that_ended_well_stands_in_its_report(make_run):
    root = make_run()
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"reward/std": 0.0, "reward/mean": 0.0, "eval/score_stderr": 0.01}
    rows[-1]["eval/score"] = 0.0
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    page = write_report(root).read_text()

    assert "Evaluation fell from 0.05 ± 0.01 to 0 ± 0.01; lower policy.optimizer.lr." in page
    assert "Every reward was 0: equal rewards teach nothing; see streamrl samples." in page
