"""The documentation builds as a site: every warning is an error, and no page loads anything from another host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamrl.metrics.names import METRICS
from tests.docs.generated import PAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        # Without --quiet: it raises the logger's level above WARNING, and --strict then counts no warning.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_builds_without_a_broken_link(site):
    assert (site / "index.html").is_file()


def test_the_pages_that_are_made_from_the_code_are_in_the_site_and_not_in_git(site):
    for name, page in PAGES.items():
        headings = re.findall(r"^##? (.+)$", page(), re.M)
        html = (site / name.replace(".md", ".html")).read_text()
        words = {word for heading in headings for word in re.findall(r"[A-Za-z]+", heading)}
        assert len(headings) > 5 and [word for word in words if word not in html] == [], name
        assert f"/docs/{name}\n" in (ROOT / ".gitignore").read_text()


def test_the_site_has_a_search_index_over_its_pages(site):
    text = (site / "search" / "search_index.js").read_text()
    assert '"first_hour.html' in text and '"boost":3},{"location":"rewards.html#' in text
    assert 'src="javascripts/iframe-worker.js"' in (site / "index.html").read_text()


def test_links_lead_to_files_so_that_the_pages_can_be_opened_without_a_server(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # that is a server's
    links = [(page, link) for page in pages for link in re.findall(r'href="([^"#:?]+)(?:#[^"]*)?"', page.read_text())]
    assert len(links) > 50 * len(pages)
    assert [(page.name, link) for page, link in links if not (page.parent / link).is_file()] == []


def test_no_page_loads_anything_from_another_host(site):
    other_host = r"[\"']?(?:https?:)?//"
    loads = re.compile(rf"<(?:script|img|iframe)[^>]+src={other_host}|<link[^>]+stylesheet[^>]+href={other_host}")
    found = {str(page.relative_to(site)) for page in site.rglob("*.html") if loads.search(page.read_text())}
    assert found == set()


def nav_leaves(entries: list) -> list:
    """Entries of the navigation: "page.md", or {"a title of its own": "page.md"}."""
    sections = [one for one in entries if isinstance(one, dict) and isinstance(next(iter(one.values())), list)]
    inside = [leaf for one in sections for leaf in nav_leaves(next(iter(one.values())))]
    return [one for one in entries if one not in sections] + inside


def test_a_page_has_the_name_of_its_heading_in_the_navigation_and_in_links():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    titles = [leaf for leaf in nav_leaves(nav) if not isinstance(leaf, str)]
    assert titles == [{"Home": "index.md"}], "the heading of a page is its title"

    wrong = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name, target in re.findall(r"\[([A-Z][^\]]+)\]\(([^)#:]+\.md)\)", page.read_text()):
            path = (page.parent / target).resolve()
            text = PAGES[path.name]() if path.parent == ROOT / "docs" and path.name in PAGES else path.read_text()
            heading = text.partition("\n")[0].removeprefix("# ")
            if path.is_relative_to(ROOT / "docs") and heading.lower() != " ".join(name.lower().split()):
                wrong.append(f"{page.relative_to(ROOT)}: [{name}]({target}) has the heading {heading!r}")
    assert not wrong, "\n".join(wrong)


def test_the_page_of_examples_has_the_table_of_the_folder():
    table = [line for line in (ROOT / "examples" / "README.md").read_text().splitlines() if line.startswith("|")]
    rows = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", "\n".join(table))
    assert rows.count("\n") >= 7 and rows in (ROOT / "docs" / "examples.md").read_text()


def test_every_metric_that_a_page_names_is_measured():
    families = {key.partition("/")[0] for key in METRICS}
    open_families = tuple(key[:-1] for key in METRICS if key.endswith("/*"))
    pages = {path for path in (ROOT / "docs").glob("*.md") if path.name != "change.md"}  # its examples are inventions
    for page in sorted(pages):
        named = set(re.findall(rf"`((?:{'|'.join(families)})/[a-z0-9_/]+)`", page.read_text()))
        missing = {key for key in named if key not in METRICS and not key.startswith(open_families)}
        assert not {key for key in missing if not (ROOT / key).exists()}, page.name


def test_what_the_log_says_on_the_page_of_troubles_is_what_the_code_says():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r'^\| (".+?") \|', page, re.M)
    said = [text for cell in cells for text in re.findall(r'"([^"]+)"', cell)]
    said += re.findall(r"```text\n(.+)\n```", page)
    files = [path for room in ("learner", "streamrl", "actors") for path in sorted((ROOT / room).rglob("*.py"))]
    code = "".join(path.read_text() for path in files)
    code = re.sub(r'"\s+f?"|\{[^{}]*\}|%[s.0-9f]+', "", code)  # one text per string; what is filled in is left out

    assert len(said) > 6
    for text in said:
        stem = re.sub(r"tcp://\S+?(?= |$)| \.\.\.|\d+", "", text)
        assert stem.replace("  ", " ") in code.replace("  ", " "), text
