"""Each family's way of writing a call is read; what looks like one and cannot be read is a bad call that says why."""

from __future__ import annotations

import pytest

from envs.tools.calculator import Calculator
from envs.tools.parsing import PARSERS, BadCall, ToolCall, spoken
from envs.tools.python import PythonTool
from streamrl.config.schema import ToolUseConfig

TOOLS = [Calculator(), PythonTool(ToolUseConfig())]
CALL = ToolCall("calculator", {"expression": "3+4"})
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call>'
LLAMA = '{"name": "calculator", "parameters": {"expression": "3+4"}}'
FUNCTION = '<function=calculator>{"expression": "3+4"}</function>'
FENCE = f"I compute it.\n```json\n{LLAMA}\n```"
PROGRAM = "```python\nprint(7)\n```"


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("tags", f"First this: {HERMES}", [CALL]),
        ("tags", HERMES + HERMES, [CALL, CALL]),
        ("tags", HERMES.removesuffix("</tool_call>"), [CALL]),
        ("tags", HERMES.replace('{"expression": "3+4"}', r'"{\"expression\": \"3+4\"}"'), [CALL]),
        ("tags", LLAMA, []),
        ("json", LLAMA, [CALL]),
        ("json", f"<|python_tag|>{LLAMA}; {LLAMA}", [CALL, CALL]),
        ("json", FUNCTION, [CALL]),
        ("json", 'The answer is {"x": 1}', []),
        ("json", '{"x": 1}', []),
        ("fence", FENCE, [CALL]),
        ("fence", PROGRAM, [ToolCall("python", {"code": "print(7)\n"})]),
        ("fence", '```json\n{"answer": 7}\n```', []),
        ("angle", "<3+4>", [CALL]),
        ("angle", "3+4", []),
    ],
)  # fmt: skip
def test_calls(parser: str, text: str, calls: list[ToolCall]) -> None:
    assert PARSERS[parser](text, TOOLS) == calls


@pytest.mark.parametrize("text", [HERMES, LLAMA, FUNCTION, FENCE])
def test_auto_finds_the_family_by_the_text(text: str) -> None:
    assert PARSERS["auto"](text, TOOLS) == [CALL]


@pytest.mark.parametrize("text", ["7", "<b>7</b>", "a < b > c", "", "```\n7\n```"])
def test_auto_takes_other_texts_as_answers(text: str) -> None:
    assert PARSERS["auto"](text, TOOLS) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>calculator(3+4)</tool_call>", "not JSON"),
        ('<tool_call>{"name": "calculator", "arguments": {"expr', "not JSON"),
        ("<tool_call>[1]</tool_call>", "no name"),
        ('<tool_call>{"name": "calculator", "arguments": 7}</tool_call>', "arguments of calculator are 7"),
        ("<function=calculator>3+4</function>", "arguments of calculator are not JSON"),
        ('{"name": "calculator", "parameters": {"expression": 3+4}}', "not JSON"),
        ('```json\n{"name": "calculator",}\n```', "not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_call_says_what_was_wrong(text: str, problem: str) -> None:
    (call,) = PARSERS["auto"](text, TOOLS)
    assert isinstance(call, BadCall) and problem in call.problem


def test_calls_that_are_only_thought_of_are_not_made() -> None:
    assert PARSERS["auto"](spoken(f"<think>perhaps {HERMES}</think>7"), TOOLS) == []
    assert PARSERS["auto"](spoken(f"<think>so</think>{HERMES}"), TOOLS) == [CALL]


def test_without_a_python_tool_a_program_is_an_answer() -> None:
    assert PARSERS["auto"](PROGRAM, TOOLS[:1]) == []
