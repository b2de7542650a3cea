"""The README is one screen and its commands work; the pages that it leads to name files that exist."""

import re
import tomllib
from pathlib import Path

from envs.check import check_task
from envs.registry import load_task, task_of
from streamrl.config.load import load_config
from streamrl.config.overrides import check_names
from tests.docs.extract import all_items
from tests.docs.generated import PAGES

ROOT = Path(__file__).parents[2]
README, AGENTS = ((ROOT / name).read_text() for name in ("README.md", "AGENTS.md"))
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_link_leads_to_a_file():
    links = {(path, target) for path in DOCS for target in re.findall(r"\]\(([^)#]+?)\)", path.read_text())}
    assert [
        (str(path.relative_to(ROOT)), target) for path, target in sorted(links)
        if not target.startswith("http") and not (path.parent / target).exists()
        and not (path.parent == ROOT / "docs" and target in PAGES)
    ] == []


def test_every_row_of_a_table_stands_below_its_head():
    first = re.compile(r"(?m)(?<!\|\n)^\|.*$(?!\n\|[ :|-]+$)")  # no row above, and no rule below
    wrong = [f"{page.relative_to(ROOT)}: {row}" for page in [*DOCS, *sorted((ROOT / "examples").rglob("*.md"))]
             for row in first.findall(page.read_text(encoding="utf-8"))]
    assert wrong == []


def test_the_first_command_stands_on_the_first_screen_and_the_page_is_short():
    before = README.partition("make quickstart")[0]
    assert len(before.split()) < 100 and "docs/results/staleness" not in before, "a real run, not the simulation"
    assert len(README.splitlines()) <= 150


def test_every_make_target_exists():
    targets = set(re.findall(r"\bmake ([a-z0-9-]+)\b", README))
    makefile = (ROOT / "Makefile").read_text()
    assert {"quickstart", "test", "smollm2"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_every_command_names_real_settings():
    lines = re.findall(r"^streamrl (?:launch|learner) (.+)$", README, re.M)
    assert len(lines) >= 2
    for line in lines:
        words = [word for word in line.partition("#")[0].split() if word != "-m"]
        check_names(words)
        if not any("," in word for word in words) and "env.path=my_task.py" not in words:
            load_config(words)


def test_what_is_debugged_has_its_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f'{{"question": "{number} + 1 = ?", "answer": "{number + 1}"}}\n' for number in range(40)]
    Path("train.jsonl").write_text("".join(lines))
    commands = []
    for item in all_items():
        if item.kind == "file" and item.name == "reward.py":
            Path(item.name).write_text(item.text)
        elif item.text.startswith("streamrl debug "):
            commands.append(item.text.split()[2:])
            check_task(task_of(load_config(commands[-1])))
    assert len(commands) >= 2


def test_the_twenty_line_task_is_one_and_plays(tmp_path):
    code = re.search(r"```python\n(# my_task\.py.*?)```", (ROOT / "docs" / "first_hour.md").read_text(), re.S)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "my_task.py").write_text(code[1])
    check_task(load_task("", path=str(tmp_path / "my_task.py")))


def test_every_folder_in_the_table_exists_and_every_package_is_in_it():
    named = set(re.findall(r"^\| `(\w+)/` \|", AGENTS, re.M))
    assert named == {"streamrl", "actors", "learner", "envs", "configs", "tests", "bench", "docs", "examples"}
    assert all((ROOT / name).is_dir() for name in named)


def test_every_extra_of_the_package_is_in_the_table():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    table = page[page.index("| extra | brings |") : page.index("| command | what it does |")]
    assert set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (.+?) \|", table, re.M)))) == set(extras)


def test_every_file_it_tells_to_read_exists():
    for name in re.findall(r"`((?:learner|actors|streamrl)/[\w/]+\.py)`", AGENTS):
        assert (ROOT / name).is_file(), name
