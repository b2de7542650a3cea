"""The python tool runs in the sandbox, the search tool finds documents; both say what went wrong."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from envs.registry import task_of
from envs.tasks.strings import StringTask
from envs.thoughts import heard, spoken
from envs.tools.calculator import Calculator, calculate
from envs.tools.environment import ToolEnv
from envs.tools.parsing import PARSERS, BadCall, ToolCall, parse_written
from envs.tools.search import SearchTool
from envs.tools.task import PythonTool, with_tools
from envs.tools.tool import ToolError
from streamrl.config.load import from_plain
from streamrl.config.schema import Config, EnvConfig, Sandbox, ToolUseConfig
from streamrl.environment import Env, HasTools, Step
from streamrl.errors import StreamrlError, TaskError

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


# --- The calculator computes arithmetic, exactly where it can, and nothing else ----------------

@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+4", "7"), ("37*45", "1665"), (" (1 + 2) * -3", "-9"), ("2**100", str(2**100)), ("7/2", "3.5"),
        ("6/2", "3"), ("7//2 + 7%2", "4"), ("2^3", "8"), ("sqrt(16) + max(1, 2)", "6"), ("round(2*pi, 2)", "6.28"),
        ("1/3*3", "1"), ("3 * 7**-1 * 7", "3"), ("2**2000 // 2**1990", "1024"),
        ("7 % (5/2)", "2"), ("floor(7/2)", "3"), ("round(2/3, 2)", "0.67"), ("4**(6/3)", "16"), ("4**(1/2)", "2"),
        ("1e300*10", "1e+301"), ("0.1+0.2", "0.3"), ("6 × 7 − 2", "40"),
    ],
)  # fmt: skip
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "not an arithmetic expression"), ("3+", "not an arithmetic expression"), ("1/0", "division by zero"),
        ("9**9**9**9", "too large"), ("10.0**400", "cannot be computed"), ("1e308*10", "too large"),
        ("(-8)**0.5", "not a real number"), ("__import__('os').system('true')", "not arithmetic"),
        ("[1][0]", "not arithmetic"), ("x+1", "not arithmetic"), ("'a'*3", "not arithmetic"),
        ("True", "not arithmetic"),
        ("sqrt(-1)", "not an arithmetic"), ("sqrt()", "cannot be computed"), ("1" * 2000, "at most 1000"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic"), ("2**-4000000", "too large"),
        ("2**(8000000/2)", "too large"), ("(1/2)**4000000", "too large"), ("0**-1", "division by zero"),
        ("2**2000/3", "cannot be computed"),
    ],
)  # fmt: skip
def test_problems_are_told(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        calculate(expression)


# --- Each family's way of writing a call is read; what looks like one and cannot be read is a bad call that says why

TOOLS = [Calculator(), PythonTool(ToolUseConfig())]
CALL = ToolCall("calculator", {"expression": "3+4"})
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call>'
LLAMA = '{"name": "calculator", "parameters": {"expression": "3+4"}}'
FUNCTION = '<function=calculator>{"expression": "3+4"}</function>'
FENCE = f"I compute it.\n```json\n{LLAMA}\n```"
XML = "<function=calculator>\n<parameter=expression>\n3+4\n</parameter>\n</function>"
PYTHON_XML = "<function=python><parameter=code>\nif x:\n  print('</function>')\n</parameter></function>"
PROGRAM = "```python\nprint(7)\n```"
ARGUMENTS = '{"expression": "3+4"}'
FAMILIES = {
    "GLM 4.5": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>3+4</arg_value>\n</tool_call>",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
               f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "DeepSeek V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
                   f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek V3.1": "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>"
                     f"{ARGUMENTS}<｜tool▁call▁end｜>",
    "Mistral 7B v0.3": f'I look.[TOOL_CALLS] [{{"name": "calculator", "arguments": {ARGUMENTS}, "id": "a12345678"}}]',
    "Mistral Small 3.2": f"[TOOL_CALLS]calculator[CALL_ID]a12345678[ARGS]{ARGUMENTS}",
    "Granite 3.3": f'<|tool_call|>[{{"name": "calculator", "arguments": {ARGUMENTS}}}]',
    "Phi-4-mini": f'<|tool_call|>[{{"name": "calculator", "arguments": {ARGUMENTS}}}]<|/tool_call|>',
    "Command R": f'Action: ```json\n[\n  {{"tool_name": "calculator", "parameters": {ARGUMENTS}}}\n]```',
    "Command R7B": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "calculator", "parameters": {ARGUMENTS}}}]'
                   "<|END_ACTION|>",
    "Llama 4": '<|python_start|>[calculator(expression="3+4")]<|python_end|>',
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.calculator<|channel|>"
               f"commentary <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "Gemma 4": '<|channel>thought\nHm.<channel|><|tool_call>call:calculator{expression:<|"|>3+4<|"|>}<tool_call|>',
    "FunctionGemma": "<start_function_call>call:calculator{expression:<escape>3+4<escape>}<end_function_call>",
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="calculator">\n<parameter name="expression">3+4</parameter>\n'
                  "</invoke>\n</minimax:tool_call>",
    "DeepSeek V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="calculator">\n'
                     '<｜DSML｜parameter name="expression" string="true">3+4</｜DSML｜parameter>\n'
                     "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "Seed-OSS": f"<seed:tool_call>\n{XML}\n</seed:tool_call>",
    "InternLM 2": f'<|action_start|><|plugin|>\n{{"name": "calculator", "parameters": {ARGUMENTS}}}<|action_end|>',
    "Granite 20B": f'<function_call> {{"name": "calculator", "arguments": {ARGUMENTS}}}',
    "Phi-4": f'functools[{{"name": "calculator", "arguments": {ARGUMENTS}}}]',
    "OLMo 3": '<function_calls>\ncalculator(expression="3+4")\n</function_calls>',
}


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
        *(("auto", text, [CALL]) for text in FAMILIES.values()),
        *(("auto", f"I look. {text}", [CALL]) for text in FAMILIES.values()),
        ("tags", '<tool_call>{"name": "calculator", "arguments": {"expression": "</tool_call>"}}</tool_call>' + HERMES,
         [ToolCall("calculator", {"expression": "</tool_call>"}), CALL]),
        ("marks", FAMILIES["Kimi K2"] * 2, [CALL, CALL]),
        ("json", '{"name": "python", "parameters": {"code": "[TOOL_CALLS]"}}',
         [ToolCall("python", {"code": "[TOOL_CALLS]"})]),
        ("python", "[python(code='a', n=[1, 2.5, true, None], o={'x': null}), calculator(expression='3+4')]",
         [ToolCall("python", {"code": "a", "n": [1, 2.5, True, None], "o": {"x": None}}), CALL]),
        ("python", "[max(3, 4)]", []),
        ("python", f"{FAMILIES['Llama 4']}\nand {FAMILIES['Llama 4']}", [CALL, CALL]),
        ("python", "<|tool_call_start|>[max(a=3)]<|tool_call_end|>", [ToolCall("max", {"a": 3})]),
        ("python", "[python(from='a=b', code=', in=3', lambda =1)]",
         [ToolCall("python", {"from": "a=b", "code": ", in=3", "lambda": 1})]),
        ("python", "x = calculator(expression='3+4')", []),
        ("angle", "<3+4>", [CALL]),
        ("angle", "3+4", []),
    ],
)  # fmt: skip
def test_calls(parser: str, text: str, calls: list[ToolCall]) -> None:
    assert PARSERS[parser](text, TOOLS) == calls


@pytest.mark.parametrize("text", [HERMES, LLAMA, FUNCTION, FENCE, XML, f"<tool_call>{XML}</tool_call>"])
def test_auto_finds_the_family_by_the_text(text: str) -> None:
    assert PARSERS["auto"](text, TOOLS) == [CALL]


@pytest.mark.parametrize(
    "before", ["[Step 1] I add.", "{so}", '{"plan": "a\nb"}', '{"plan": 1}', "[1, 2]", "[a](b)", "f(x) = 3", "[", "{"]
)
def test_words_before_a_call_may_look_like_the_beginning_of_another(before: str) -> None:
    for text in (HERMES, *(text for name, text in FAMILIES.items() if name not in ("gpt-oss", "Command R"))):
        assert PARSERS["auto"](spoken(f"{before}\n{text}"), TOOLS) == [CALL], text


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
        ("<|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>3+", "arguments of calculator are 3"),
        ("<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+4", "close each with </arg_value>"),
        ("[calculator('3+4')]", "have no names"),
        ("<tool_call>calculator\n", "not JSON"),
        ("[calculator(expression=3+x)]", "not plain values"),
        ('{"name": "calculator", "parameters": {"expression": 3+4}}', "not JSON"),
        ('```json\n{"name": "calculator",}\n```', "not JSON"),
        *((f"{mark}[calculator(expression='3+4", "not Python") for mark in ("<|python_start|>", "<|tool_call_start|>")),
        ("<function_calls>\ncalculator(expression='3+4'\n</function_calls>", "not Python"),
        ("<|python_start|>[calculator(expression='3+4'), 7]<|python_end|>", "no call"),
        (f"<|python_start|>[calculator(expression='{'+' * 30000}')]<|python_end|>", "are read"),
    ],
)  # fmt: skip
def test_a_damaged_call_says_what_was_wrong(text: str, problem: str) -> None:
    (call,) = PARSERS["auto"](text, TOOLS)
    assert isinstance(call, BadCall) and problem in call.problem


ENDS = (
    "parameter>", "</arg_value>", "call:calculator", "</function_calls>", "<|python_end|>", '<|"|>', "<escape>",
    "<|message|>", "invoke",
)  # fmt: skip
"""Ends of an argument, which end it in its own form wherever they stand."""


def test_marks_of_other_calls_in_an_argument_are_a_part_of_it() -> None:
    texts = {**FAMILIES, "Hermes": HERMES, "Llama 3": LLAMA}
    wrong = []
    for (family, text), (other, mark) in product(texts.items(), texts.items()):
        if family == "Command R" or any(end in text and end in mark for end in ENDS):
            continue  # a fence is looked for last
        value = f"see {mark} and 8"
        arguments = {ARGUMENTS: json.dumps({"expression": value}), '"3+4"': repr(value), "3+4": value}
        place = next(place for place in arguments if place in text)
        text = text.replace(place, arguments[place])
        if PARSERS["auto"](spoken(text), TOOLS) != [ToolCall("calculator", {"expression": value})]:
            wrong.append((family, other))
    assert wrong == []


def between_tags(value: str) -> list[str]:
    invoked = f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{value}</parameter>\n</invoke>'
    return [
        f"<tool_call><function=f><parameter=x>{value}</parameter></function></tool_call>",
        f"<seed:tool_call>\n<function=f>\n<parameter=x>{value}</parameter>\n</function>\n</seed:tool_call>",
        f"<tool_call>f<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>",
        invoked, invoked.replace("invoke", "｜DSML｜invoke").replace("parameter", "｜DSML｜parameter"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["\na\n", "\n\na", "a\n\n", " a ", "a\n</tool_call>\nb"])
def test_all_between_the_tags_is_the_text_of_an_argument(value: str) -> None:
    for text in between_tags(value)[2:]:
        assert PARSERS["auto"](text, []) == [ToolCall("f", {"x": value})]
    for text in between_tags(f"\n{value}\n")[:2]:  # where templates write a line of its own
        assert PARSERS["auto"](text, []) == [ToolCall("f", {"x": value})]


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [("string", "7", "7"), ("integer", "7", 7), ("array", "[1, 2]", [1, 2]), ("boolean", "true", True),
     (["string", "null"], "7", "7"), ("number", "x", "x"), (None, "7", "7"),
     ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),  # as pydantic writes int | None
     ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
     ({"oneOf": [{"type": "array"}, {"enum": [1, 2]}]}, "[1]", [1]), ({"allOf": [{"$ref": "#/$defs/P"}]}, "{}", {}),
     ({"enum": [1, 2]}, "2", 2), ({"enum": ["1", "2"]}, "2", "2"), ({"const": 3}, "3", 3),
     ({"$ref": "#/$defs/P"}, '{"a": 1}', {"a": 1}), ({"$ref": "#/$defs/Color"}, "red", "red"), (7, "7", "7"),
     # As templates write what is no text: str() of Python.
     ("boolean", "True", True), ("boolean", "False\n", False), ("array", "['a', True, None]", ["a", True, None]),
     ("object", "{'a': {'b': (1, 2.5)}, 'c': true}", {"a": {"b": [1, 2.5]}, "c": True}), ("integer", "3+4j", "3+4j"),
     ("array", "[f(1)]", "[f(1)]"), ("array", "{1, 2}", "{1, 2}"), ("array", "(" * 9999, "(" * 9999),
     (["string", "null"], "null", None), (["string", "null"], "None", None), (["integer", "null"], "None", None),
     ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None), ({"enum": ["a", None]}, "None", None),
     ("string", "null", "null"), ("string", "None", "None"), ("string", "True", "True"), (None, "null", "null")],
)  # fmt: skip
def test_an_argument_between_tags_has_the_type_that_the_tool_takes(kind: object, value: str, read: object) -> None:
    takes = {"properties": {"x": {} if kind is None else kind if isinstance(kind, dict) else {"type": kind}}}
    schema = {"type": "function", "function": {"name": "f", "parameters": takes}}
    for text in between_tags(value):
        (call,) = parse_written(text, [schema])
        assert isinstance(call, ToolCall) and call.arguments["x"] == read and type(call.arguments["x"]) is type(read)


@pytest.mark.timeout(60)  # hours where the time grows with the square
def test_a_long_text_of_beginnings_is_read_in_a_moment() -> None:
    marks = ["\n", " ", "{", "[", "<", "a ", "call:", "<think>", "<tool_call>", "<tool_call>a<arg_key>", "<function=a>"]
    marks += ["<|tool_call>call:a{", "<|channel|>", "[TOOL_CALLS]a[ARGS]{", "<|python_start|>", '<invoke name="a">']
    for first, mark in product(["", "[", "<tool_call>", "<function=a><parameter=x>", "<|python_start|>a("], marks):
        calls = PARSERS["auto"](first + mark * (100_000 // len(mark)), TOOLS)
        assert not any(isinstance(one, ToolCall) and one.name != "a" for one in calls)


def test_calls_that_are_only_thought_of_are_not_made() -> None:
    assert PARSERS["auto"](spoken(f"<think>perhaps {HERMES}"), TOOLS) == []
    assert PARSERS["auto"](spoken(heard(f"perhaps {HERMES}", "user: 3+4? <think>\n")), TOOLS) == []
    assert PARSERS["auto"](spoken(heard(f"so</think>{HERMES}", "user: 3+4? <think>\n")), TOOLS) == [CALL]
    assert PARSERS["auto"](spoken(f"<think>perhaps {HERMES}</think>7"), TOOLS) == []
    assert PARSERS["auto"](spoken(f"<think>so</think>{HERMES}"), TOOLS) == [CALL]


def test_without_a_python_tool_a_program_is_an_answer() -> None:
    assert PARSERS["auto"](PROGRAM, TOOLS[:1]) == []


# --- Episodes with tools: calls are answered, problems are reported to the model, the final answer goes to the task

TIMES = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


class Reverse:
    """A user's own async tool."""

    name, description = "reverse", "Reverse a text."
    parameters: Mapping[str, Any] = {
        "type": "object", "required": ["text"],
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
    }  # fmt: skip

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if arguments["text"] == "":
            raise RuntimeError("nothing to reverse")
        return str(arguments["text"][::-1]) * arguments.get("times", 1)


OWN = f"{__name__}:Reverse"


def settings(*words: str) -> Config:
    return from_plain({}, ["policy.tiny.enabled=true", "env.max_turns=4", "env.options.max_length=4", *words])


def new_env(*words: str) -> tuple[Env, dict[str, Any]]:
    task = task_of(settings(*words))
    record = dict(task.record("train", 0))
    env = task.env()
    play(env.reset, record)
    return env, record


def play(method: Callable[[Any], Any], argument: object) -> Any:
    result = method(argument)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def say(env: Env, *actions: str) -> list[Step]:
    return [play(env.step, action) for action in actions]


def reverse(arguments: str) -> str:
    return f'<tool_call>{{"name": "reverse", "arguments": {arguments}}}</tool_call>'


@pytest.mark.shows("env.tools")
def test_any_task_gets_tools_and_scores_the_final_answer() -> None:
    plain, record = new_env("env.tools=[]")
    assert say(plain, TIMES)[0].done
    env, record = new_env("env.tools=[calculator]")
    asked, answered = say(env, f"I compute. {TIMES}", record["answer"])
    assert isinstance(env, ToolEnv) and not inspect.iscoroutinefunction(env.step)
    assert [(m.role, m.content) for m in asked.messages] == [("tool", "42")] and not asked.done and asked.reward == 0
    assert answered.done and answered.reward == 1.0 and answered.score == 1.0
    assert answered.parts["tool_calls"] == 1.0 and answered.parts["tool_errors"] == 0.0


def test_an_own_async_tool_and_a_wrong_answer() -> None:
    env, record = new_env(f"env.tools=[{OWN},calculator]")
    assert isinstance(env, ToolEnv) and inspect.iscoroutinefunction(env.step)
    asked, both, answered = say(env, reverse('{"text": "abc", "times": 2}'), TIMES + reverse('{"text": "x"}'), "???")
    assert [m.content for m in asked.messages] == ["cbacba"]
    assert [m.content for m in both.messages] == ["42", "x"]
    assert answered.done and answered.score == 0.0 and answered.parts["tool_calls"] == 3.0


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (reverse("{}"), "Error: reverse: the argument 'text' is missing."),
        (reverse('{"text": 3}'), "Error: reverse: the argument 'text' must be of type string, got 3."),
        (reverse('{"text": "a", "times": true}'), "must be of type integer, got True."),
        (reverse('{"text": "a", "time": 2}'), "unknown argument 'time'. Did you mean times? It takes: text, times."),
        (reverse('{"text": ""}'), "Error: RuntimeError: nothing to reverse"),
        (reverse('{"text": "a"}').replace('"reverse"', '"revers"'), "there is no tool 'revers'. Did you mean reverse?"),
        ("<tool_call>reverse(a)</tool_call>", "Error: the call is not JSON"),
    ],
)
def test_errors_are_answers_to_the_model(action: str, problem: str) -> None:
    env, record = new_env(f"env.tools=[{OWN}]")
    asked, answered = say(env, action, record["answer"])
    assert problem in asked.messages[0].content and not asked.done
    assert answered.reward == 1.0 and answered.parts["tool_errors"] == 1.0


@pytest.mark.shows("env.tool_use.call_reward", "env.tool_use.error_penalty")
def test_calls_may_earn_something_themselves_which_is_no_score() -> None:
    env, record = new_env(
        f"env.tools=[{OWN},calculator]", "env.tool_use.call_reward=0.25", "env.tool_use.error_penalty=0.1",
        "env.max_turns=9",
    )
    two, mixed, answered = say(env, TIMES + TIMES, TIMES + reverse("{}"), record["answer"])
    assert [(one.reward, one.score) for one in (two, mixed)] == [(0.5, 0.0), (pytest.approx(0.15), 0.0)]
    assert (answered.reward, answered.score) == (1.0, 1.0)


@pytest.mark.shows("env.tool_use.max_calls")
def test_after_so_many_calls_the_next_text_is_the_answer() -> None:
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.max_calls=1", "env.max_turns=9")
    first, second, third = say(env, TIMES + TIMES, TIMES, TIMES)
    assert [m.content for m in first.messages] == ["42", "No calls are left: give the final answer."]
    assert second.done and second.parts["tool_calls"] == 1.0
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.max_calls=2", "env.max_turns=9")
    first, second = say(env, TIMES + TIMES, TIMES)
    assert [m.content for m in first.messages] == ["42", "42"]
    assert [m.content for m in second.messages] == ["No calls are left: give the final answer."]


def test_the_last_turn_is_the_answer_whatever_it_holds() -> None:
    env, _ = new_env("env.tools=[calculator]", "env.max_turns=2")
    first, last = say(env, TIMES, TIMES)
    assert not first.done and last.done and last.score == 0.0


@pytest.mark.shows("env.tool_use.max_output_chars")
@pytest.mark.shows("env.tool_use.role")
def test_long_outputs_are_cut_and_come_in_the_role_that_is_set() -> None:
    words = (f"env.tools=[{OWN}]", "env.tool_use.max_output_chars=3", "env.tool_use.role=user")
    (asked,) = say(new_env(*words)[0], reverse('{"text": "edcba"}'))
    assert [(m.role, m.content) for m in asked.messages] == [("user", "abc\n... (2 more characters)")]


@pytest.mark.parametrize(("said", "name"), [
    ("<6*7>", "calculator"), ('<tool_call>{"name": "<|im_end|>", "arguments": {}}</tool_call>', "unknown"),
    ("<tool_call>{</tool_call>", "unknown"),
])
def test_a_result_has_the_name_and_the_id_that_templates_ask_for(said: str, name: str) -> None:
    words = ("env.tools=[calculator]", f"env.tool_use.parser={'angle' if said == '<6*7>' else 'tags'}")
    asked = say(new_env(*words)[0], said)[0].messages[0]
    assert asked.fields["name"] == name
    assert len(asked.fields["tool_call_id"]) == 9 and asked.fields["tool_call_id"].isalnum()
    by_user = say(new_env(*words, "env.tool_use.role=user")[0], said)[0].messages[0]
    assert not by_user.fields



@pytest.mark.shows("env.tool_use.parser")
def test_the_parser_that_is_set_reads_the_calls() -> None:
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.parser=angle")
    assert say(env, "<6*7>")[0].messages[0].content == "42"
    assert say(new_env("env.tools=[calculator]")[0], "<6*7>")[0].done


@pytest.mark.shows("env.tool_use.describe")
def test_tools_are_described_unless_turned_off() -> None:
    task = task_of(settings("env.tools=[calculator,python]"))
    assert '"name": "python"' in task.tool_prompt and "<tool_call>" in task.tool_prompt  # type: ignore[attr-defined]
    env, _ = new_env("env.tools=[calculator,python]")
    assert isinstance(env, HasTools) and [one["function"]["name"] for one in env.tools] == ["calculator", "python"]
    env, _ = new_env("env.tools=[calculator]", "env.tool_use.describe=false")
    assert isinstance(env, HasTools) and env.tools == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["env.tools=[calculator]", "env.max_turns=1"], "a call takes one turn and the answer another"),
        (["env.tools=[calculater]"], "env.tools=calculater is unknown. Did you mean calculator?"),
        (["env.tools=[calculator,calculator]"], "gives one name to several tools"),
        (["env.tools=[pathlib:Path]"], "pathlib:Path is not a tool"),
        (["env.tools=[search]"], "set env.tool_use.documents=FILE"),
        (["env.tools=[search]", "env.tool_use.documents=nowhere.jsonl"], "no such file"),
        (["env.tools=[calculator]", "env.tool_use.parser=xml"], "env.tool_use.parser=xml is unknown"),
    ],
)
def test_mistakes_in_the_settings_are_told(words: list[str], problem: str) -> None:
    with pytest.raises(StreamrlError, match=problem.replace("[", r"\[").replace(".", r"\.").replace("?", r"\?")):
        task_of(settings(*words))
