"""The python tool runs in the sandbox, the search tool finds documents; both say what went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.tasks.strings import StringTask
from envs.tools.python import PythonTool
from envs.tools.search import SearchTool
from envs.tools.task import with_tools
from streamrl.config.schema import EnvConfig, Sandbox, ToolUseConfig
from streamrl.errors import TaskError

DOCUMENTS = [
    {"title": "Rhine", "text": "The Rhine flows from the Alps to the North Sea."},
    {"title": "Danube", "text": "The Danube flows into the Black Sea and passes Vienna."},
    {"text": "Bread is baked from flour."},
]


@pytest.fixture(scope="module")
def python() -> PythonTool:
    return PythonTool(ToolUseConfig(sandbox=Sandbox.limited, timeout_s=5.0))


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = 1", "no output"),
        ("print(1)\n1 / 0", "ZeroDivisionError"),
        ("print(", "SyntaxError"),
        ("raise SystemExit(3)", "Error: "),
    ],
)
def test_python_shows_what_a_program_printed_or_raised(python: PythonTool, program: str, output: str) -> None:
    assert output in python.call({"code": program})


@pytest.mark.shows("env.tool_use.timeout_s")
def test_python_ends_a_program_after_the_time_that_is_set() -> None:
    tool = PythonTool(ToolUseConfig(sandbox=Sandbox.limited, timeout_s=0.5))
    assert "more than 0.5 s" in tool.call({"code": "while True: pass"})


@pytest.mark.shows("env.tool_use.sandbox")
def test_python_runs_in_the_sandbox_that_is_set(tmp_path: Path) -> None:
    for part in (tmp_path, *tmp_path.parents):  # the sandbox runs as another user
        part.chmod(0o755)
        if part.name.startswith("pytest-of-"):
            break
    secret = tmp_path / "file.txt"
    secret.write_text("of this machine")
    program = {"code": f"print(open({str(secret)!r}).read())"}
    assert "of this machine" in PythonTool(ToolUseConfig(sandbox=Sandbox.limited)).call(program)
    try:
        said = PythonTool(ToolUseConfig(sandbox=Sandbox.isolated)).call(program)
    except TaskError as error:
        said = str(error)
        assert "Sandbox level 2 does not work here" in said
    assert "of this machine" not in said


@pytest.fixture
def documents(tmp_path: Path) -> str:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return str(path)


@pytest.mark.shows("env.tool_use.documents")
def test_search_finds_the_documents_with_the_words(documents: str) -> None:
    tool = SearchTool(ToolUseConfig(documents=documents))
    assert tool.call({"query": "What passes Vienna?"}) == (
        "[1] Danube\nThe Danube flows into the Black Sea and passes Vienna."
    )
    best, second = tool.call({"query": "the north sea"}).split("\n\n")
    assert best.startswith("[1] Rhine\n") and second.startswith("[2] Danube\n")
    assert tool.call({"query": "quantum"}) == tool.call({"query": ""}) == "Nothing was found."


def test_documents_without_a_text_are_refused_by_record(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"words": "none"}\n')
    with pytest.raises(TaskError, match="record 1.*no text in any of the fields text"):
        SearchTool(ToolUseConfig(documents=str(path)))


def test_search_and_python_in_one_episode(documents: str) -> None:
    use = ToolUseConfig(documents=documents, sandbox=Sandbox.limited)
    task = with_tools(StringTask("copy"), EnvConfig(tools=["python", "search"], max_turns=4, tool_use=use))
    env, record = task.env(), task.record("test", 0)
    env.reset(record)
    program = "```python\nprint(sum(range(5)))\n```"
    query = '<tool_call>{"name": "search", "arguments": {"query": "flour"}}</tool_call>'
    steps = [env.step(text) for text in (program, query, record["answer"])]
    assert [step.messages[0].content for step in steps[:2]] == ["10\n", "[1] Bread is baked from flour."]  # type: ignore[union-attr]
    assert steps[2].done and steps[2].score == 1.0  # type: ignore[union-attr]
