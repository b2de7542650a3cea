r"""Find the answer in a completion: the last \boxed{...}, the last <answer> tag, the last code block."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from envs.thoughts import CLOSED, OPENED, spoken

ANSWER_TAGS = (OPENED, CLOSED, "<answer>", "</answer>")
_OPENED, _CLOSED = ANSWER_TAGS[2:]
_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*((?:[-+−]?[\d.]|\\[a-zA-Z]|[a-zA-Z](?![a-zA-Z ]))[^$\n]*?)"
    r"(?=\$|\\[)\]]|\n|\.(?:\s|$)|$)"
)
"""A box without braces holds what follows it, up to the end of the mathematics or of the sentence."""
_SPAN = re.compile(
    r"\$\$(.+?)\$\$|\$(?=\S)([^$\n]*?\S)\$(?!\d)|\\\(((?:[^\\]|\\[^()])+)\\\)|\\\[((?:[^\\]|\\[^\[\]])+)\\\]", re.DOTALL
)
"""A bracket that is opened again before it is closed opens nothing: else time is quadratic in those never closed."""
_SIGN = r"(=|[-+*/^<>×·⋅−]|\\(?:times|cdot|div)(?![a-zA-Z]))"
_AROUND_SIGN = re.compile(rf"(?:(?<=[\d)}}%])|(?<=(?<![A-Za-z])[A-Za-z]))(?:\s+{_SIGN}\s+|{_SIGN}\s*)(?=[\w({{\\.$])")
_POINT = re.compile(r"[(\[]\s*[-−]?[\d.]+(?:\s*,\s*[-−]?[\d.]+)+\s*[)\]]")
_GROUPED = re.compile(r"(?<=\d)[ \u00a0\u202f](?=\d+/\d)")
_PLAIN = re.compile(
    r"([-−+]?)(?:\\?\$|[€£])?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"((?:[eE][-+−]?\d{1,3})?(?:/\d+)?)((?:\\?%|°|[A-Za-z]{2,}(?:[²³]|\^[23])?|m[²³])?)"
)
_FINAL = "####"
_FENCE, _PYTHON_FENCE = "```", "```python"


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{`, with balanced braces, stripped; None if there is none or it is not closed.

    A box in a box belongs to the outer one. Escaped braces are letters: `\boxed{\{1, 2\}}`. `\boxed5` holds 5.
    """
    opened: list[tuple[int, int]] = []  # of each open brace: where its box starts or -1, and where its content does
    start, end = -1, 0
    content: tuple[int, int] | None = None  # cut out at the end: cutting at every box is quadratic in nested ones
    for match in _BRACE.finditer(text):
        if match[1] or match[0] == "{":
            opened.append((match.start() if match[1] else -1, match.end()))
        elif match[0] == "}" and opened:
            box, begin = opened.pop()
            if box >= 0:
                start, end, content = box, match.end(), (begin, match.start())
    if any(box > start for box, _ in opened):
        return None
    found = None if content is None else text[slice(*content)].strip()
    unbraced = [match[1].strip() for match in _UNBRACED.finditer(text, end)]
    if unbraced or found is None:
        return unbraced[-1] if unbraced else None
    inner = last_boxed(found) if found.count("\\boxed") == 1 else None
    twice = inner is not None and re.fullmatch(rf"\\boxed\s*\{{?\s*{re.escape(inner)}\s*\}}?", found)
    return inner if twice else found


def last_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`, stripped; None if there is none."""
    end = text.rfind(_CLOSED)
    while end >= 0:  # not a regular expression: its time is quadratic in tags that are never closed
        before = text.rfind(_CLOSED, 0, end)
        start = text.find(_OPENED, max(before, 0), end)
        if start >= 0:
            return text[start + len(_OPENED) : end].strip()
        end = before
    return None


def last_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K ends an answer."""
    rest = text.rpartition(_FINAL)[2].strip() if _FINAL in text else ""
    return rest.splitlines()[0].strip() if rest else None


def last_number(text: str) -> str | None:
    r"""The last number of a text, with all that it is a part of: `\frac{1}{2}`, `2x` and `3-5` are not a digit.

    A number by itself has no commas between thousands, and no currency or unit; a percent sign stays.
    """
    ends = [match.end() for match in re.finditer(r"\d", text)]
    if not ends:
        return None
    for match in _SPAN.finditer(text):
        if match.start() < ends[-1] <= match.end():
            return _number_alone(next(filter(None, match.groups())).strip())
    text = _AROUND_SIGN.sub(lambda found: found[1] or found[2], text)
    text = _GROUPED.sub(r"\\ ", _POINT.sub(lambda found: re.sub(r"\s", "", found[0]), text))
    for token in reversed(re.split(r"(?<!\\)\s+", text)):
        token = token.lstrip("*_`\"'").rstrip("*_`\"',;:!?.")
        if not _POINT.fullmatch(token):
            token = token.lstrip("([*_`").rstrip(")].,;:!?*_`")
        if re.search(r"\d", token):
            return _number_alone(token)
    return None


def _number_alone(token: str) -> str:
    """A calculation's result without the calculation; a number without its commas, currency and unit."""
    left, equals, right = token.rpartition("=")
    if equals and (not re.search(r"[A-Za-z]", left) or re.fullmatch(r"[A-Za-z]\w*", left)):
        token = right.strip()
    found = _PLAIN.fullmatch(token)
    if not found:
        return token
    unit = found[4] if found[4].endswith("%") else ""
    return (found[1].strip("+") + found[2].replace(",", "") + found[3]).replace("−", "-") + unit


def first_found(text: str, *finders: Callable[[str], str | None]) -> str | None:
    """The result of the first finder that finds anything; None if none does."""
    return next((found for find in finders if (found := find(text)) is not None), None)


def stated_answer(completion: str) -> str:
    """The answer that a completion gives, for comparing completions: after its thoughts in a box, in a tag, or all."""
    text = spoken(completion)
    return first_found(text, last_boxed, last_answer_tag) or text.strip()


def final_answer(text: str) -> str:
    """The answer in a record's own answer: after the last `####`, as GSM8K writes it, in a box, or all of it."""
    if _FINAL in text:
        return text.rsplit(_FINAL, 1)[1].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def has_format(text: str, tags: Sequence[str]) -> bool:
    """Each tag stands in `text` exactly once, in this order, and nothing follows the last one."""
    places = [text.find(tag) for tag in tags]
    once = all(text.count(tag) == 1 for tag in tags)
    return once and places == sorted(places) and (not tags or text.endswith(tags[-1]))


def last_code_block(text: str) -> tuple[str, bool]:
    """A program and whether it stood in a fence of Python.

    The text after the last ```python up to the next fence. Without one, the text before the first fence: it may still
    be right, but it was not given in the form that was asked for.
    """
    start = text.rfind(_PYTHON_FENCE)
    if start < 0:
        return text.split(_FENCE, 1)[0], False
    return text[start + len(_PYTHON_FENCE) :].split(_FENCE, 1)[0], True
