"""Whole messages through a model's chat template; a template that leaves out what a message says is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError

from streamrl.environment import SYSTEM_ROLES, THOUGHTS, ChatMessage
from streamrl.errors import ConfigError, TaskError

log = logging.getLogger("streamrl.data")

Tools = Sequence[Mapping[str, Any]]
_THOUGHTS = rf"[.'\"](?:{'|'.join(THOUGHTS)})\b"
"""A template that asks for a message's thoughts; others speak of them, or of `enable_thinking`."""
Form = dict[str, Any]
"""A message as templates read it."""
_warned: set[str] = set()
_found: dict[Any, Any] = {}
"""Findings on templates, by what was asked."""
MAX_FOUND = 1000


def template_text(tokenizer: Any) -> str:
    """The chat template's source; a tokenizer may hold several by name, among them one for tools."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def template_of_settings(given: str | None) -> str | None:
    """`data.chat_template` as Jinja text. Raises ConfigError for a file that is not there, or a broken template."""
    if given is None or "{" not in given:
        if given is None:
            return None
        try:
            given = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.chat_template={given} must be Jinja text, or a file of it: {error}") from error
    try:  # transformers' own tag around the model's turns is no part of Jinja
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", given))
    except TemplateError as error:
        raise ConfigError(f"data.chat_template must be a Jinja template: {error}") from error
    return given


def writes_calls(template: str) -> bool:
    """Whether the template writes calls of tools."""
    return "tool_calls" in template


def template_forms(messages: Sequence[ChatMessage], template: str) -> list[Form]:
    """The messages as this template reads them.

    Raises TaskError: a message calls tools, and the template writes no calls.
    """
    forms = [message.as_dict() for message in messages]
    for number, form in enumerate(forms, 1):
        if form["role"] == "developer" and not re.search(r"['\"]developer['\"]", template):
            form["role"] = "system"
        if form.get("tool_calls") and not writes_calls(template):
            raise TaskError(
                f"message {number} has tool_calls, which the chat template does not write: give one that does with "
                "data.chat_template"
            )
        if any(form.get(name) for name in THOUGHTS) and not re.search(_THOUGHTS, template):
            _tell_once(
                "the chat template does not write reasoning_content: the model does not see that part of messages; "
                "data.chat_template gives another"
            )
    return forms


def rendered(tokenizer: Any, forms: Sequence[Form], tools: Tools = (), **options: Any) -> str:
    """The text of a conversation; tools that the template never shows are told once.

    Raises:
        TaskError: it leaves out a call, or a message that is not the assistant's. Also what the template raises.
    """
    whole = _rendered(tokenizer, forms, tools, **options)
    given = options.get("chat_template")
    if tools and not shows_tools(tokenizer, forms, given):
        _tell_once(
            "the chat template shows no tools: the model does not know which there are; data.chat_template gives "
            "another"
        )
    for number in _left_out(tokenizer, forms, tools, options):
        role = forms[number]["role"]
        hint = " (of env.tools: env.tool_use.role=user)" if role == "tool" else ""
        raise TaskError(
            f"the chat template leaves out message {number + 1}, of {role}, which the model would not read: change its "
            f"role{hint}, or give another template with data.chat_template"
        )
    return whole


def shows_tools(tokenizer: Any, forms: Sequence[Any], template: str | None = None) -> bool:
    """Tell whether the template shows tools to a conversation that begins like this one; yes, if none can say.

    Args:
        template: in place of the tokenizer's own.
    """
    first = forms[0] if forms else {"role": "user"}
    role = first["role"] if isinstance(first, dict) else first.role
    opening = ["system"] if role in SYSTEM_ROLES else []
    asked = [{"role": one, "content": "?"} for one in [*opening, "user"]]
    mark = "streamrltool"
    takes = {"type": "object", "properties": {}}
    function = {"name": mark, "description": mark, "parameters": takes}
    tool = {"type": "function", "function": function}
    given = {} if template is None else {"chat_template": template}

    def look() -> bool:
        try:
            return mark in _rendered(tokenizer, asked, [tool], add_generation_prompt=True, **given)
        except Exception:  # a template raises what it likes
            return True

    key = template or template_text(tokenizer), bool(opening)
    return bool(_known(key, look))


def _left_out(
    tokenizer: Any, forms: Sequence[Form], tools: Tools,
    options: Mapping[str, Any],
) -> list[int]:
    """Places of the messages, the assistant's aside, whose content the template does not write."""
    marks = {
        number: f"streamrlsaid{number}end"
        for number, form in enumerate(forms)
        if form.get("content") and form["role"] != "assistant"
    }

    def look() -> list[int]:
        marked = [
            {**form, "content": marks[number]} if number in marks else form for number, form in enumerate(forms)
        ]
        try:
            text = _rendered(tokenizer, marked, tools, **options)
        except Exception:  # it looks at what contents say
            return []
        text = text.casefold()
        return [one for one, mark in marks.items() if mark not in text]

    template = options.get("chat_template") or template_text(tokenizer)
    flags = tuple(sorted(
        name for name, value in options.items() if value is True
    ))
    shape = tuple(
        (form["role"], *sorted(name for name in form if form[name]))
        for form in forms
    )
    key = template, flags, bool(tools), shape
    return list(_known(key, look))


def _known(key: Any, look: Callable[[], Any]) -> Any:
    """The finding of this key, looked for once."""
    found = _found.get(key)
    if found is None:
        if len(_found) >= MAX_FOUND:
            _found.clear()
        found = _found[key] = look()
    return found


def _rendered(tokenizer: Any, forms: Sequence[Form], tools: Tools = (), **options: Any) -> str:
    """The text of a conversation whose calls are all written.

    Arguments of calls are given as objects, or as JSON to a template that wants texts; where it cannot do without the
    content of a call, that is an empty text. Which of these it reads is seen by calls with marks in their place.

    Raises:
        TaskError: it leaves out a call in every form, for example one in a message that has text. Also what it raises.
    """
    def text(some: Sequence[Form]) -> str:
        return tokenizer.apply_chat_template(list(some), tools=list(tools) or None, tokenize=False, **options)

    callers = [number for number, form in enumerate(forms, 1) for _ in form.get("tool_calls") or ()]
    if not callers:
        return text(forms)
    marks = [f"streamrlcall{number}end" for number in range(len(callers))]
    left_out, failure = None, None
    for some, change in product(_by_content(forms), (_as_object, _as_text)):
        try:
            probe = text(_with_marks(some, marks, change))
            whole = text([_with_arguments(form, change) for form in some])
        except Exception as error:  # a template raises what it likes
            failure = failure or error
            continue
        missing = [caller for caller, mark in zip(callers, marks, strict=True) if mark not in probe]
        if missing:
            left_out = left_out or missing[0]
        elif not any(f"{{'{mark}'" in probe for mark in marks):  # an object in Python's form, which is no JSON
            _tell_of_words(forms, whole)
            return whole
    if left_out is not None:
        raise TaskError(
            f"message {left_out} has tool_calls, of which the chat template leaves out one (some write none in a "
            "message with text, or only the first): give another with data.chat_template, or one call a message"
        )
    assert failure is not None, "texts are written as they are"
    raise failure


def _with_marks(forms: Sequence[Form], marks: Sequence[str], change: Callable[[Any], Any]) -> list[Form]:
    """The messages with a mark as the one argument of each call."""
    left = iter(marks)
    return [_with_arguments(form, lambda _: change({next(left): 1})) for form in forms]


def _by_content(forms: Sequence[Form]) -> Iterator[Sequence[Form]]:
    """The messages as they are; with None, and with an empty text, as the content of those that have none."""
    yield forms
    if any(form.get("tool_calls") and form.get("content") == "" for form in forms):
        yield [{**form, "content": form.get("content") or None} if form.get("tool_calls") else form for form in forms]
    yield [{**form, "content": form.get("content") or ""} for form in forms]


def _tell_of_words(forms: Sequence[Form], whole: str) -> None:
    if any(form.get("tool_calls") and (form.get("content") or "").strip() not in whole for form in forms):
        _tell_once(
            "the chat template does not write the content of messages that call tools: the model does not see these "
            "words; data.chat_template gives another"
        )


def plain_text(message: ChatMessage) -> str:
    """A message's text where there is no template. Raises TaskError: it says more than that."""
    for name in ("tool_calls", *THOUGHTS):
        if message.fields.get(name):
            raise TaskError(
                f"a message of {message.role} has {name}, which only a chat template can write: give one with "
                "data.chat_template, or leave the field out"
            )
    return message.content


def text_with_calls(message: ChatMessage) -> str:
    """A message for readers of plain text, with its calls of tools."""
    return "\n".join(filter(None, [message.content, *map(call_text, message.fields.get("tool_calls") or ())]))


def call_text(call: Mapping[str, Any]) -> str:
    """A call of a tool in the form that env.tools reads."""
    (plain,) = _with_arguments({"tool_calls": [call]}, _as_text)["tool_calls"]
    name, arguments = plain["function"].get("name"), plain["function"]["arguments"]
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


def is_whole_call(call: Mapping[str, Any]) -> bool:
    """Whether a call's arguments are an object or JSON of one: what a model wrote may be cut."""
    (plain,) = _with_arguments({"tool_calls": [call]}, _as_object)["tool_calls"]
    return isinstance(plain["function"]["arguments"], Mapping)


def _with_arguments(form: Form, change: Callable[[Any], Any]) -> Form:
    """The message with its calls in OpenAI's form, their arguments changed."""
    if not form.get("tool_calls"):
        return form
    calls = []
    for call in form["tool_calls"]:
        inner = call.get("function", {key: call[key] for key in ("name", "arguments") if key in call})
        others = {key: value for key, value in call.items() if key not in inner or "function" in call}
        calls.append({"type": "function", **others, "function": {**inner, "arguments": change(inner.get("arguments"))}})
    return {**form, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    """Arguments as an object, if they are one or JSON of one; what a model wrote may be neither."""
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments)
            return found if isinstance(found, Mapping) else arguments
    return arguments or {}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) and arguments else json.dumps(arguments or {}, ensure_ascii=False)


def _tell_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
