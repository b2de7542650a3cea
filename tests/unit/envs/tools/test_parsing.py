"""Each family's way of writing a call is read; what looks like one and cannot be read is a bad call that says why."""

from __future__ import annotations

import pytest

from envs.rewards.thoughts import heard, spoken
from envs.tools.calculator import Calculator
from envs.tools.parsing import PARSERS, BadCall, ToolCall, parse_tags
from envs.tools.python import PythonTool
from streamrl.config.schema import ToolUseConfig

TOOLS = [Calculator(), PythonTool(ToolUseConfig())]
CALL = ToolCall("calculator", {"expression": "3+4"})
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call>'
LLAMA = '{"name": "calculator", "parameters": {"expression": "3+4"}}'
FUNCTION = '<function=calculator>{"expression": "3+4"}</function>'
FENCE = f"I compute it.\n```json\n{LLAMA}\n```"
XML = "<function=calculator>\n<parameter=expression>\n3+4\n</parameter>\n</function>"
PYTHON_XML = "<function=python><parameter=code>\nif x:\n  print('</function>')\n</parameter></function>"
PROGRAM = "```python\nprint(7)\n```"


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("tags", f"First this: {HERMES}", [CALL]),
        ("tags", HERMES + HERMES, [CALL, CALL]),
        ("tags", HERMES.removesuffix("</tool_call>"), [CALL]),
        ("tags", HERMES.replace('{"expression": "3+4"}', r'"{\"expression\": \"3+4\"}"'), [CALL]),
        ("tags", LLAMA, []),
        ("tags", f"<tool_call>[{LLAMA}, {LLAMA}]</tool_call>", [CALL, CALL]),
        ("tags", f"<tool_call>{LLAMA}\n{LLAMA}</tool_call>", [CALL, CALL]),
        ("tags", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ("tags", f"I compute. <tool_call>\n{XML}\n</tool_call>", [CALL]),
        ("tags", f"<tool_call>\n{XML}\n{XML}\n</tool_call>", [CALL, CALL]),
        ("tags", f"<tool_call>{PYTHON_XML}</tool_call>",
         [ToolCall("python", {"code": "if x:\n  print('</function>')"})]),
        ("tags", "<tool_call><function=now></function></tool_call>", [ToolCall("now", {})]),
        ("tags", XML, []),
        ("json", XML, [CALL]),
        ("json", f"[{LLAMA}, {LLAMA}]", [CALL, CALL]),
        ("json", f"{LLAMA}\nThat is what I need.", [CALL]),
        ("json", '{"name": "Ann", "age": 7}', []),
        ("json", '[{"name": "Ann", "age": 7}]', []),
        ("json", '{"name": "Ann", "age": 7', []),
        ("json", '{"name": "calculator", "price": 7}', []),
        ("json", '{"name": "calculator"}', [ToolCall("calculator", {})]),
        ("fence", '```json\n{"name": "Ann", "age": 7}\n```', []),
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


@pytest.mark.parametrize("text", [HERMES, LLAMA, FUNCTION, FENCE, XML, f"<tool_call>{XML}</tool_call>"])
def test_auto_finds_the_family_by_the_text(text: str) -> None:
    assert PARSERS["auto"](text, TOOLS) == [CALL]


@pytest.mark.parametrize("text", ["7", "<b>7</b>", "a < b > c", "", "```\n7\n```", '{"name": "Ann", "age": 7}', "[3]"])
def test_auto_takes_other_texts_as_answers(text: str) -> None:
    assert PARSERS["auto"](text, TOOLS) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>calculator(3+4)</tool_call>", "not JSON"),
        ('<tool_call>{"name": "calculator", "arguments": {"expr', "not JSON"),
        ("<tool_call>[1]</tool_call>", "no name"),
        ("<tool_call></tool_call>", "empty"),
        (XML.removesuffix("\n</parameter>\n</function>"), "'expression' of calculator does not end"),
        (XML.replace("\n</function>", "so"), "after the arguments of calculator stands 'so'"),
        ('[{"name": "calculator", "arguments": {}', "not JSON"),
        ('<tool_call>{"name": "calculator", "arguments": 7}</tool_call>', "arguments of calculator are 7"),
        ("<function=calculator>3+4</function>", "arguments of calculator are not JSON"),
        ('{"name": "calculator", "parameters": {"expression": 3+4}}', "not JSON"),
        ('```json\n{"name": "calculator",}\n```', "not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_call_says_what_was_wrong(text: str, problem: str) -> None:
    (call,) = PARSERS["auto"](text, TOOLS)
    assert isinstance(call, BadCall) and problem in call.problem


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [("string", "7", "7"), ("integer", "7", 7), ("array", "[1, 2]", [1, 2]), ("boolean", "true", True),
     (["string", "null"], "7", "7"), ("number", "x", "x"), (None, "7", "7")],
)  # fmt: skip
def test_an_argument_between_tags_has_the_type_that_the_tool_takes(kind: object, value: str, read: object) -> None:
    takes = {"properties": {"x": {} if kind is None else {"type": kind}}}
    schema = {"type": "function", "function": {"name": "f", "parameters": takes}}
    text = f"<tool_call><function=f><parameter=x>{value}</parameter></function></tool_call>"
    assert parse_tags(text, [schema]) == [ToolCall("f", {"x": read})]


def test_calls_that_are_only_thought_of_are_not_made() -> None:
    assert PARSERS["auto"](spoken(f"<think>perhaps {HERMES}"), TOOLS) == []
    assert PARSERS["auto"](spoken(heard(f"perhaps {HERMES}", "user: 3+4? <think>\n")), TOOLS) == []
    assert PARSERS["auto"](spoken(heard(f"so</think>{HERMES}", "user: 3+4? <think>\n")), TOOLS) == [CALL]
    assert PARSERS["auto"](spoken(f"<think>perhaps {HERMES}</think>7"), TOOLS) == []
    assert PARSERS["auto"](spoken(f"<think>so</think>{HERMES}"), TOOLS) == [CALL]


def test_without_a_python_tool_a_program_is_an_answer() -> None:
    assert PARSERS["auto"](PROGRAM, TOOLS[:1]) == []
