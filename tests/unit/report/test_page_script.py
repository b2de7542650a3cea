"""The script of the pages: it fits the markup, and in a browser, where there is one, it redraws what was written."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from streamrl.report.charts import EDGE
from streamrl.report.compare import write_comparison
from streamrl.report.page import asset
from streamrl.report.report import write_report

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")


class Elements(HTMLParser):
    """Every class and every attribute of a page."""

    def __init__(self, text):
        super().__init__()
        self.classes, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            self.attributes.add(name)
            self.classes |= set(value.split()) if name == "class" and value else set()


def test_what_the_script_looks_for_is_in_the_pages(make_run, tmp_path):
    runs = [make_run("a"), make_run("b")]
    with (runs[0] / "metrics.jsonl").open("a") as file:  # error bars
        file.write('{"step": 11, "eval/score": 0.5, "eval/num_prompts": 100}\n')
    write_comparison(runs, tmp_path / "c.html")
    page = Elements(write_report(runs[0]).read_text() + (tmp_path / "c.html").read_text())
    script = asset("page.js")

    wanted = re.findall(r'querySelector(?:All)?\("([^"]+)"\)', script)
    assert len(wanted) >= 8
    for selector in wanted:
        assert set(re.findall(r"\.([a-z-]+)", selector)) <= page.classes, selector
        assert set(re.findall(r"\[([a-z-]+)", selector)) <= page.attributes, selector
    assert {f"data-{name}" for name in re.findall(r"dataset\.(\w+)", script)} <= page.attributes
    assert f"EDGE = {EDGE};" in script


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_in_a_browser_the_script_runs_and_draws_every_curve_where_it_was(make_run, tmp_path):
    report = write_report(make_run())

    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--dump-dom", report.as_uri()], capture_output=True, text=True, timeout=100)

    assert '<div class="axis">' in done.stdout and 'aria-pressed="true">step' in done.stdout, "the script has run"
    written, drawn = curves(report.read_text()), curves(done.stdout)
    assert len(drawn) == len(written) > 3
    for before, after in zip(written, drawn, strict=True):
        assert after == pytest.approx(before, abs=0.02)


def curves(page):
    """The coordinates of every curve."""
    paths = re.findall(r'<path class="curve[^>]*? d="([^"]*)"', page)
    return [[float(number) for number in re.findall(r"[\d.]+", path)] for path in paths]
