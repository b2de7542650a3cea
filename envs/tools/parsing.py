"""Find the calls in what a model said. Families of models write them in different ways.

    tags     <tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>     Hermes, Qwen
             <tool_call><function=calculator><parameter=expression>3+4</parameter></function></tool_call>   Qwen3-Coder
             <tool_call>calculator<arg_key>expression</arg_key><arg_value>3+4</arg_value></tool_call>       GLM
             <invoke name="calculator"><parameter name="expression">3+4</parameter></invoke>   MiniMax, DeepSeek 3.2
    marks    <|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{"expression": "3+4"}     Kimi
             the same with the marks of DeepSeek, or [TOOL_CALLS]calculator[ARGS]{"expression": "3+4"}      Mistral
    json     {"name": "calculator", "parameters": {"expression": "3+4"}}, also after a mark of a family     Llama 3
             <function=calculator>{"expression": "3+4"}</function>
    python   [calculator(expression="3+4")], and nothing else                                      Llama 4, OLMo 3
    fence    the same object in a fence of json, or a program in a fence of python
    angle    <3+4>, the one argument of the first tool                                             tiny models

Where nothing looks like a call, the text is the final answer: an object outside of a tag is a call only if it has
arguments. What looks like a call and cannot be read becomes a `BadCall`, whose reason goes to the model as an
observation.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.data.shapes import json_or_text
from envs.family_forms import FAMILY_CALLS, rewritten
from envs.tools.tool import Tool, required, schema

_TAG, _TAG_ENDS = "<tool_call>", "</tool_call>"
_PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MARKED = re.compile(  # before the arguments
    r"(?:<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?|<\|tool_call_begin\|>(?:functions\.)?|\[TOOL_CALLS\])"
    r"([\w.-]+)(?::\d+)?(?:<｜tool▁sep｜>|<\|tool_call_argument_begin\|>|(?:\[CALL_ID\]\w+)?\[ARGS\]|\n```json\n)\s*"
)
_LISTED = re.compile(
    r"<\|python_tag\|>|\[TOOL_CALLS\]|<\|tool_call\|>|<tool_calls>|<\|START_ACTION\|>|<\|?function_call\|?>|functools(?=\[)|"
    r"<\|action_start\|>\s*<\|plugin\|>|<\|tool_call_start\|>"
)
_PYTHON = re.compile(r"\[?\s*[A-Za-z_][\w.]*\(")
_PYTHON_MARKS = {"<|python_start|>": "<|python_end|>", "<function_calls>": "</function_calls>",
                 "<|tool_call_start|>": "<|tool_call_end|>"}
_PYTHON_BLOCK = re.compile(
    "|".join(rf"{re.escape(begin)}(.*?)(?:{re.escape(end)}|\Z)" for begin, end in _PYTHON_MARKS.items()), re.DOTALL
)
STARTS = (
    _TAG, "<function=", "<｜tool▁call", "<|tool_call", "[TOOL_CALLS]", "<tool_calls>", "<|START_ACTION|>",
    "<|python_", "<function_calls>", "<minimax:tool_call>", "<｜DSML｜", "<invoke name=",
)
"""The marks with which calls begin, in any of these forms."""
_INVOKED = {  # tags with names in quotes, each in a namespace of its family or none
    re.compile(r'<(?:[^\s<>/]*[:｜])?invoke name="([^"<>]+)">'): r"<function=\1>",
    re.compile(r'<(?:[^\s<>/]*[:｜])?parameter name="([^"<>]+)"[^<>]*>'): r"<parameter=\1>\n",
    re.compile(r"</(?:[^\s<>/]*[:｜])?invoke>"): "</function>",
    re.compile(r"</(?:[^\s<>/]*[:｜])?parameter>"): "\n</parameter>",  # all between the tags is the value
}
_FUNCTION = re.compile(r"<function=([\w.-]+)>")
_FUNCTIONS = re.compile(r'<function=|invoke name="')
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_VALUE = re.compile(
    r"(?:\s*</function>)?(?:\s*<function=[\w.-]+>)?\s*<parameter=[^<>\n]+>|"
    r"\s*(?:[\w.-]+\s*)?<arg_key>[^<]*</arg_key>\s*<(arg_value)>"
)
_FENCE = re.compile(r"```(json|python|py)[ \t]*\n(.*?)(```|$)", re.DOTALL)
_ANGLE = re.compile(r"<([^<>]*)>")
_FUNCTION_ENDS, _PARAMETER_ENDS = "</function>", "</parameter>"
_AT_ONCE, _BETWEEN, _BLANK = re.compile(rf"\s*{_FUNCTION_ENDS}"), re.compile(r"[; ,\n]*"), re.compile(r"\s*")
_OBJECT = re.compile(r"\[?\s*\{")
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
MAX_PYTHON = 20_000
"""Characters of calls in Python that are read: its own parser takes them."""
FORM = 'write {"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; whether there is such a tool is not known yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """Something that was meant as a call; `problem` is what the model reads."""

    problem: str


Calls = list[ToolCall | BadCall]
Described = Sequence[Tool | Mapping[str, Any]]
"""Tools, or their JSON schemas as chat templates get them."""
Parser = Callable[[str, Sequence[Tool]], Calls]
Forms = dict[Callable[[str, Described], Calls], re.Pattern[str]]
"""Readers, and how the calls of each begin."""


def parse_tags(text: str, tools: Described) -> Calls:
    """All calls in every <tool_call>; one that the end of the text cuts off is complete if its JSON is."""
    calls: Calls = []
    at, known = 0, _schemas(tools)
    while (found := text.find(_TAG, at)) >= 0:
        start = found + len(_TAG)
        end = text.find(_TAG_ENDS, _after_values(text, start))
        at = end if end >= 0 else len(text)
        body = text[start:at]
        if body.lstrip().startswith("<function="):
            calls += _functions(body, tools)
        elif not _OBJECT.match(body.lstrip()) and ("<arg_key>" in body or (end >= 0 and body.strip() in known)):
            calls.append(_from_pairs(body, known))
        else:
            values = _values(body, alone=True) or [ValueError("it is empty")]
            calls += [_from_value(value) for value in values]
    return calls


def parse_json(text: str, tools: Described) -> Calls:
    """A text that is one JSON object with a name and arguments, or several of them; or <function=name>."""
    return _first_begun(text, tools, _FORMS_OF_JSON)


def _alone(text: str, tools: Described) -> Calls:
    text = text.replace("<|python_tag|>", "").strip()
    return _calls_of(text, tools) if text.startswith(("{", "[")) else []


def _listed(text: str, tools: Described) -> Calls:
    mark = _LISTED.search(text)
    return [] if mark is None else _alone(text[mark.end() :], tools)


def parse_marks(text: str, tools: Described) -> Calls:
    """Calls whose name and arguments stand between marks, as DeepSeek, Kimi and Mistral write them."""
    calls: Calls = []
    decoder, at = json.JSONDecoder(), 0
    while found := _MARKED.search(text, at):
        at = found.end()
        try:
            arguments, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            calls.append(BadCall(f"the arguments of {found[1]} are not JSON ({error})."))
        else:
            calls.append(_from_arguments(found[1], arguments))
    return calls


def parse_python(text: str, tools: Described) -> Calls:
    """Calls of Python, as a list or one a line: between marks, or the whole text, a known tool among them."""
    blocks = ["".join(found) for found in _PYTHON_BLOCK.findall(text)]  # words may stand around them
    return [one for block in blocks or [text] for one in _of_python(block.strip(), tools, marked=bool(blocks))]


def _of_python(text: str, tools: Described, *, marked: bool) -> Calls:
    if not _PYTHON.match(text) or (len(text) > MAX_PYTHON and not marked):
        return []
    try:
        if len(text) > MAX_PYTHON:
            raise ValueError(f"{len(text)} characters, of which {MAX_PYTHON} are read")
        values = [line.value if isinstance(line, ast.Expr) else line for line in _python_tree(text).body]
        inner = [one for value in values for one in (value.elts if isinstance(value, ast.List) else [value])]
        called = [(ast.unparse(one.func), one) for one in inner if isinstance(one, ast.Call)]
        if len(called) < len(inner):
            raise ValueError("something is no call")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = f"the calls are not Python ({error!s:.80}): write [name(argument=value)]."
        return [BadCall(problem)] if marked else []
    known = marked or any(name in _schemas(tools) for name, _ in called)
    return [_from_python(*one) for one in called] if known else []


def _python_tree(text: str) -> ast.Module:
    """Parse calls, whose arguments may be named as words of Python are."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse(_RESERVED.sub(lambda found: found[1] or f"{found[2]}{_OWN_WORD}", text))


def parse_fence(text: str, tools: Sequence[Tool]) -> Calls:
    """Fences of json with a name and arguments, and fences of python where there is a tool of that name."""
    calls: Calls = []
    has_python = any(tool.name == "python" for tool in tools)
    for language, body, _ in _FENCE.findall(text):
        if language != "json" and has_python:
            calls.append(ToolCall("python", {"code": body}))
        elif language == "json":
            calls += _calls_of(body.strip(), tools)
    return calls


def parse_angle(text: str, tools: Sequence[Tool]) -> Calls:
    """<text> calls the first tool with its one required argument."""
    tool = tools[0]
    names = required(tool)
    if len(names) != 1:
        return [BadCall(f"{tool.name} takes {len(names)} arguments, and <...> holds one.")] if "<" in text else []
    return [ToolCall(tool.name, {names[0]: body}) for body in _ANGLE.findall(text)]


def parse_auto(text: str, tools: Sequence[Tool]) -> Calls:
    """Calls as `parse_written` reads them, else those in fences."""
    return parse_written(text, tools) or parse_fence(text, tools)


def parse_written(text: str, tools: Described) -> Calls:
    """Calls in the form that begins first of tags, marks, python and json: marks in an argument are part of it."""
    return _first_begun(text, tools, {_of_family: FAMILY_CALLS, **_FORMS})


def _of_family(text: str, tools: Described) -> Calls:
    return _first_begun(rewritten(text), tools, _FORMS)


def _first_begun(text: str, tools: Described, forms: Forms) -> Calls:
    """The calls of the form that begins first; what begins as JSON and is none, gives way to a form with marks."""
    text = text.lstrip()
    found = [(begun.start(), parse) for parse, begins in forms.items() if (begun := begins.search(text))]
    damaged: Calls = []
    for _, parse in sorted(found, key=lambda one: one[0]):
        calls = parse(text, tools)
        if calls and (parse is not _alone or any(isinstance(one, ToolCall) for one in calls)):
            return calls
        damaged = damaged or calls
    return damaged


PARSERS: dict[str, Parser] = {
    "auto": parse_auto, "tags": parse_tags, "marks": parse_marks, "json": parse_json, "python": parse_python,
    "fence": parse_fence, "angle": parse_angle,
}  # fmt: skip


def _calls_of(text: str, tools: Described) -> Calls:
    """The calls among the values of a text that is JSON; none where no value has both a name and arguments."""
    values = _values(text, alone=False)
    damaged = any(isinstance(value, ValueError) for value in values)
    meant = any(
        isinstance(value, dict) and isinstance(name := _first(value, _NAMES), str)
        and (any(key in value for key in _ARGUMENTS) or (len(value) == 1 and name in _schemas(tools)))
        for value in values
    )
    if damaged and any(f'"{key}"' in text for key in _NAMES):
        names = (f'"{name}"' for name in _schemas(tools))
        meant = meant or any(word in text for word in (*(f'"{key}"' for key in _ARGUMENTS), *names))
    return [_from_value(value) for value in values] if meant else []


def _values(text: str, *, alone: bool) -> list[Any]:
    """The JSON values of a text, those of lists one by one, with commas or semicolons between them.

    An error stands for a part that is no JSON, up to the end; unless `alone`, other words may follow.
    """
    found: list[Any] = []
    decoder, text, at = json.JSONDecoder(), text.strip(), 0
    while at < len(text):  # no copy of what is left: a model may write any number of values
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*found, error if isinstance(error, ValueError) else ValueError("nested too deep")]
        found += value if isinstance(value, list) else [value]
        at = _BETWEEN.match(text, at).end()
        if not alone and not text.startswith(("{", "["), at):
            break
    return found


def _after_values(text: str, at: int) -> int:
    """The end of the values that begin here: a mark in one of them ends no tag."""
    decoder, at = json.JSONDecoder(), _BLANK.match(text, at).end()
    while text.startswith(("{", "["), at):
        try:
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        at = _BETWEEN.match(text, at).end()
    while begun := _VALUE.match(text, at):
        ends = f"</{begun[1] or 'parameter'}>"
        if (end := text.find(ends, begun.end())) < 0:
            break
        at = end + len(ends)
    return at


def _from_pairs(body: str, known: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    """A name, and arguments between <arg_key> and <arg_value>; a value as in `_from_parameters`."""
    name, _, _ = body.partition("<arg_key>")
    at, name = len(name), name.strip()
    arguments: dict[str, Any] = {}
    takes = known.get(name, {})
    while found := _PAIR.match(body, at):
        key, value, at = found[1].strip(), found[2], found.end()
        arguments[key] = _read_as(takes.get(key), value)
    if rest := body[at:].strip():
        return BadCall(f"after the arguments of {name} stands {rest!r:.40}: close each with </arg_value>.")
    return ToolCall(name, arguments)


def _from_python(name: str, call: ast.Call) -> ToolCall | BadCall:
    if call.args or any(one.arg is None for one in call.keywords):
        return BadCall(f"the arguments of {name} have no names: write {name}(name=value).")
    try:
        arguments = {
            str(one.arg).removesuffix(_OWN_WORD): ast.literal_eval(_WORDS.visit(one.value)) for one in call.keywords
        }
        json.dumps(arguments)
    except (ValueError, TypeError, RecursionError) as error:
        return BadCall(f"the arguments of {name} are not plain values ({error!s:.80}).")
    return ToolCall(name, arguments)


class _JsonWords(ast.NodeTransformer):
    """Read the words of JSON, which models mix with those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


_WORDS = _JsonWords()
_OWN_WORD = "_streamrl"
_STRING = r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*'"
_RESERVED = re.compile(rf"({_STRING})|\b({'|'.join(keyword.kwlist)})(?=\s*=[^=])", re.DOTALL)


def _functions(text: str, tools: Described) -> Calls:
    """All <function=name> with an object of arguments in it, or with <parameter=name>."""
    calls: Calls = []
    begun = _FUNCTIONS.search(text)
    for tag, plain in _INVOKED.items() if begun and begun[0] == 'invoke name="' else ():
        text = tag.sub(plain, text)
    at, known, closed = 0, _schemas(tools), text.rfind(_FUNCTION_ENDS)
    while found := _FUNCTION.search(text, at):
        name, at = found[1], found.end()
        if _PARAMETER.match(text, at) or _AT_ONCE.match(text, at):
            call, at = _from_parameters(name, text, at, known.get(name, {}))
        else:
            following = _FUNCTION.search(text, at) if at > closed else None  # one that never ends, ends there
            end = text.find(_FUNCTION_ENDS, at) if at <= closed else following.start() if following else len(text)
            call, at = _from_arguments(name, text[at:end]), end
        calls.append(call)
    return calls


def _from_parameters(name: str, text: str, at: int, takes: Mapping[str, Any]) -> tuple[ToolCall | BadCall, int]:
    """The call, and where the text goes on; a value is a text unless the tool takes something else."""
    arguments: dict[str, Any] = {}
    while found := _PARAMETER.match(text, at):
        end = text.find(_PARAMETER_ENDS, found.end())
        if end < 0:
            problem = f"the argument {found[1]!r:.60} of {name} does not end: close it with {_PARAMETER_ENDS}."
            return BadCall(problem), len(text)
        told, value = takes.get(found[1]), text[found.end() : end].removesuffix("\n")
        arguments[found[1]] = _read_as(told, value)
        at = end + len(_PARAMETER_ENDS)
    rest = text[at:].lstrip()
    if rest and not rest.startswith(_FUNCTION_ENDS):
        return BadCall(f"after the arguments of {name} stands {rest!r:.40}: close it with {_FUNCTION_ENDS}."), at
    return ToolCall(name, arguments), at


def _read_as(told: Any, value: str) -> Any:
    """The value of an argument between tags, where texts have no quotes; templates write others as JSON or Python."""
    word = value.strip()
    if word in ("null", "None") and _takes("null", told):
        return None
    if _takes("string", told):
        return value
    found = json_or_text(word)
    if found != word or len(word) > MAX_PYTHON:
        return found
    try:
        read = ast.literal_eval(_WORDS.visit(ast.parse(word, mode="eval").body))
        return json.loads(json.dumps(read)) if isinstance(read, bool | list | dict | None) else found
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return found


def _takes(kind: str, told: Any) -> bool:
    """Tell whether the schema of an argument takes a value of this type; if it does not say, a text alone."""
    if not isinstance(told, Mapping):
        return kind == "string"
    if isinstance(kinds := told.get("type"), str | list):
        return kind in kinds
    if isinstance(values := told.get("enum", [told["const"]] if "const" in told else None), list):
        return any(one is None if kind == "null" else isinstance(one, str) for one in values)
    several = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(told.get(key), list) for one in told[key]]
    return any(_takes(kind, one) for one in several) if several else kind == "string" and "$ref" not in told


def _schemas(tools: Described) -> dict[str, Mapping[str, Any]]:
    """JSON schemas of the arguments of each tool, by its name."""
    told = [tool if isinstance(tool, Mapping) else schema(tool) for tool in tools]
    functions = [one.get("function", one) for one in told]
    return {str(one.get("name")): (one.get("parameters") or {}).get("properties") or {} for one in functions}


def _from_value(call: Any) -> ToolCall | BadCall:
    if isinstance(call, ValueError):
        return BadCall(f"the call is not JSON ({call}): {FORM}.")
    if not isinstance(call, dict) or not isinstance(name := _first(call, _NAMES), str):
        return BadCall(f"the call has no name: {FORM}.")
    return _from_arguments(name, _first(call, _ARGUMENTS, {}))


def _first(call: Mapping[str, Any], keys: Sequence[str], default: Any = None) -> Any:
    return next((call[key] for key in keys if key in call), default)


def _from_arguments(name: str, arguments: Any) -> ToolCall | BadCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments of {name} are not JSON ({error}).")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {name} are {arguments!r:.60}: give an object with their names.")
    return ToolCall(name, arguments)


_FORMS_OF_JSON: Forms = {
    _alone: re.compile(r"\A[\[{]"),
    _listed: _LISTED,
    _functions: _FUNCTIONS,
}
_FORMS: Forms = {
    parse_tags: re.compile(_TAG),
    parse_marks: _MARKED,
    parse_python: re.compile(rf"\A{_PYTHON.pattern}|{'|'.join(map(re.escape, _PYTHON_MARKS))}"),
    **_FORMS_OF_JSON,
}
