r"""Mathematical answers as texts: clean them, and take lists, intervals, numbers and units apart."""

from __future__ import annotations

import re
from fractions import Fraction

CURRENCY = "¤"
"""A dollar that is money, not a delimiter of mathematics."""
_WIDE = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ",
    "±": r"\pm ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "θ": r"\theta ",
    "≈": r"\approx ", "ℝ": r"\mathbb{R}", "…": r"\ldots ", "∨": r"\lor ", "∧": r"\land ",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", "，": ", ", "、": ", ", "；": "; ", "（": "(", "）": ")", "％": "%",
})  # fmt: skip
_FUNCTIONS = "exp|ln|log|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc"
_ARGUMENT = r"\s*[(\d]|\s*\\[, ]?\s*(?:\d|\\?(?:frac|sqrt|pi))|\s+[a-z](?![a-z])"
_ARRAY = r"\\begin\s*\{(array|(?:small)?matrix)\}(?:\s*\{[^{}]*\})?(.*?)\\end\s*\{\1\}"
_HALF_DAY = r"([ap])\.?\s?m"
_REWRITTEN = [
    (r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))", ","),
    (r"\\\$|\$(?=\d[^$]*$)", CURRENCY),
    (r"\$+|(?<!\\)\\[()\[\]]|\\displaystyle|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\!|\\limits", ""),
    (rf"(?s)\(\s*{_ARRAY}\s*\)|\[\s*{_ARRAY.replace('1', '3')}\s*\]", r"\\begin{pmatrix}\2\4\\end{pmatrix}"),
    (r"(?<=\d)(?:\\,|\{,\}|\\ )(?=\d{3}(?!\d))", ","),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\\(?:lbrace|\{)\s*", r"\\{"), (r"\s*\\(?:rbrace|\})", r"\\}"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*(\w)(?=\s*[\w{\\])", r"\\frac{\1}"), (r"(\\frac\{[^{}]*\})\s*(\w)", r"\1{\2}"),  # as TeX: one letter
    (rf"\\(?:operatorname|mathrm|text|rm)\s*\{{\s*({_FUNCTIONS})\s*\}}(?={_ARGUMENT})", r"\\\1"),
    (rf"(?<![a-zA-Z\\])({_FUNCTIONS})(?={_ARGUMENT})", r"\\\1"),
    (r"\\(?:[lc]dots|dots[bcimo]?)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    (r"\\(?:math(?:rm|bf|it|sf)|text(?:rm|bf|it|normal)|mbox|operatorname)\s*\{", r"\\text{"),
    (r"\\text\s+\{", r"\\text{"),
    (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "), (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "), (r"\\gt(?![a-zA-Z])", ">"), (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\?(?<![a-zA-Z])sqrt\s*\(([^()]*)\)|√\s*\(([^()]*)\)|√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1\2\3}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "), (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
    (r"\*\*", "^"), (r"\\varnothing(?![a-zA-Z])|\\\{\\\}", r"\\emptyset"),
    (r"\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"([_^])\{(\w)\}", r"\1\2"),
    (r"\\text\{\s*(\d{1,2}:\d\d)\s+([^{}]+)\}", r"\1 \\text{\2}"),
    (rf"(?i)(:\d\d|\d(?=\s*(?:\\text\{{\s*{_HALF_DAY}|[ap]\.\s?m)))\s*(\\text\{{\s*)?{_HALF_DAY}\.?(?(3)\s*\}})\.?\s*$",
     r"\1 \\text{\4m}"),
]  # fmt: skip
_REWRITTEN_RE = [(re.compile(pattern), new) for pattern, new in _REWRITTEN]
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_BETWEEN = re.compile(
    r",?\s*\\text\{\s*(and|or)\s*\}\s*|(?<=[\s\w)}\]]),?\s+(and|or)\s+(?=\S)|"
    r"(?<=[\d)}\]])(and|or)(?=[\d(\[\\+-]|[a-z]\s*[<>=(])|"
    r"\\(?:(wedge|land)|vee|lor)(?![a-zA-Z])"
)
RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|[<>]")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CHOICE = re.compile(
    r"(?:(?:[oO]ption|[cC]hoice)\s+)?\(?([A-J])(?:\)[.:]?|\.|:|(?=$))(?!\s*(?:or|and)\b)(.*)", re.DOTALL
)
_CHOSEN = re.compile(
    r"^(\\text\{)?\s*(?:(?:[oO]ption|[cC]hoice)\s+)?\(?[A-J](?:\)[.:]?|\.|:)(?:\s|\\ )*(?(1)(\}?)\s*|)(?=[^\s}])"
)
_LETTER = re.compile(r"(?<![^\W_])(?:[B-HJ]|[AI](?! (?!and |or )[a-z]))(?![^\W_'’])")
"""A capital that stands alone; not the words in A dog and I see."""
_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d*)?"
_POWER = r"(?:[eE]([+-]?\d{1,4})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([+-]?\s*\d{1,4})\s*\}?)?"
_DECIMAL = re.compile(rf"([+-]?)\s*({_DIGITS}){_POWER}")
_REPEATING = re.compile(r"([+-]?)\s*(\d*)\.(\d*)\\overline\{(\d+)\}")
_GROUP = rf"\{{\s*([+-]?{_DIGITS})\s*\}}"
_QUOTIENT = re.compile(rf"([+-]?)\s*(?:\\frac{_GROUP}{_GROUP}|({_DIGITS})\s*/\s*({_DIGITS}))")
_MIXED = re.compile(r"([+-]?)\s*(\d+)\s*(?:\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|(?<=\d) +(\d+)\s*/\s*(\d+))")
MAX_DIGITS = 1000
"""Longer numbers are not read: a model may write any number of digits."""


def clean(text: str) -> str:
    """The same answer with one spelling for what TeX, Unicode and plain text write differently."""
    text = text.translate(_WIDE)
    for pattern, new in _REWRITTEN_RE:
        text = pattern.sub(new, text)
    related = RELATION.search(text) or r"\ne " in text
    text = _BETWEEN.sub(lambda found: _between(found, related=bool(related)), text)
    text = _TEXT.sub(lambda found: ", ".join(rf"\text{{{item}}}" for item in found[1].split(",")), text)
    text = re.sub(r"\s+", " ", text).rstrip(" .;:")
    return text.lstrip(" .;:" if not text.strip().startswith(".") else " ")


def _between(found: re.Match[str], *, related: bool) -> str:
    """Inequalities are joined by what they are joined by, other answers by commas; \\lor of neither is logic."""
    word = found[1] or found[2] or found[3]
    if not related:
        return ", " if word or (not found[4] and "=" in found.string) else found[0]
    return r" \land " if word == "and" or found[4] else r" \lor "


def bare(text: str) -> str:
    """Strip white space and marks of text: the comparison of two answers that nothing can read."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", text))  # 1 2 is not 12


def words(text: str) -> str | None:
    """A text answer in lower case; None for anything that may be mathematics."""
    marked = _TEXT.sub(r"\1", text)
    plain = re.sub(r"[\s\"']+", " ", marked).strip(" .,")
    shortest = 2 if marked != text else 3  # xy is a product, and \text{no} is a word
    is_words = re.fullmatch(r"[^\W\d_][^\W\d_ .\-]*(?:[ .\-]+[^\W\d_]+)*", plain)
    return plain.casefold() if is_words and max(map(len, re.split(r"[ .\-]+", plain))) >= shortest else None


def choice(text: str) -> str | None:
    """The letter of a multiple choice, with or without what it stands for: C, (C), C. Twelve; None if it is none.

    Two letters are two answers: A. or B. is none.
    """
    found = _CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip())
    return None if found is None or _LETTER.search(found[2]) else found[1]


def without_choice(text: str) -> str:
    r"""\text{(C)} 12 as 12."""
    return re.sub(r"^\\text\{\s*\([A-J]\)\s*\}\s*(?=\S)", "", text)


def chosen(text: str) -> str:
    """The value that a `choice` stands for; the text itself if it is a letter alone."""
    return _CHOSEN.sub(lambda found: "" if found[2] or not found[1] else found[1], text)


def parts(text: str) -> tuple[str, list[str]]:
    """Brackets and items: "()" or "[)" of a point or interval, "{}" of a set, "," of a bare list or of one value.

    "cup" is a union, and a matrix gives its name and number of columns.
    """
    text = text.strip()
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [[cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        name = "matrix" if matrix[1] in ("pmatrix", "bmatrix") else matrix[1]
        return f"{name} {list(map(len, rows))}", [cell for row in rows for cell in row]
    if len(union := _split(text, r"\\cup(?![a-zA-Z])")) > 1:
        return "cup", union
    inner, kind = _inside(text)
    if kind == "()" and len(_split(inner, ",")) == 1:
        return parts(inner)
    if kind:
        return kind, _items(inner, bare_list=False)
    both = [item.replace(r"\pm", sign).lstrip("+ ") for item in _items(text, bare_list=True)
            for sign in ("+-" if item.count(r"\pm") == 1 else " ")]  # fmt: skip
    return ",", both


def _inside(text: str) -> tuple[str, str]:
    """The text inside one pair of brackets around all of it, and that pair; the text and "" if there is none."""
    shown = text.replace(r"\{", " {").replace(r"\}", "} ").strip()
    if len(shown) < 2 or shown[0] not in _OPEN or shown[-1] not in _CLOSE or (shown[0] == "{") != (shown[-1] == "}"):
        return text, ""
    depth = 0
    for position, letter in enumerate(shown):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if depth == 0:
            whole = position == len(shown) - 1
            start, end = (2, -2) if text.startswith(r"\{") else (1, -1)
            return (text[start:end], shown[0] + shown[-1]) if whole else (text, "")
    return text, ""


def _items(text: str, *, bare_list: bool) -> list[str]:
    """Between commas; one before three digits belongs to the number, in brackets only if others have a space."""
    joined = bare_list or re.search(r",\s", text)
    hidden = _THOUSANDS.sub(lambda found: found[0].replace(",", "\0"), text) if joined else text
    return [item.replace("\0", ",") for item in _split(hidden, r"[,;]")]


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of all brackets."""
    found, depth, start = [], 0, 0
    for match in re.finditer(rf"[(\[{{]|[)\]}}]|{separator}", text):
        if match[0] in _OPEN:
            depth += 1
        elif match[0] in _CLOSE:
            depth -= 1
        elif depth == 0:
            found.append(text[start : match.start()].strip())
            start = match.end()
    return [item for item in (*found, text[start:].strip()) if item]


def number(text: str) -> Fraction | None:
    """A written number, exactly: 1,234.5, -.5, 1/2, 3 1/2, 1.5e3, 0.1 with a bar over the 1; None if it is none."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    if (found := _DECIMAL.fullmatch(text)) and (value := _fraction(found[2])) is not None:
        power = (found[3] or found[4] or "0").replace(" ", "")
        return _signed(found[1], value * Fraction(10) ** int(power))
    if found := re.fullmatch(r"([+-]?)\s*10\s*\^\s*\{?\s*([+-]?\d{1,4})\s*\}?", text):
        return _signed(found[1], Fraction(10) ** int(found[2]))
    if found := _REPEATING.fullmatch(text):
        fixed, again = found[2] + found[3], found[4]
        over = int(fixed + again) - int(fixed or "0")
        return _signed(found[1], Fraction(over, (10 ** len(again) - 1) * 10 ** len(found[3])))
    if found := _QUOTIENT.fullmatch(text):
        top, bottom = _fraction(found[2] or found[4] or ""), _fraction(found[3] or found[5] or "")
        return _signed(found[1], top / bottom) if top is not None and bottom else None
    if found := _MIXED.fullmatch(text):
        top, bottom = int(found[3] or found[5]), int(found[4] or found[6])
        return _signed(found[1], int(found[2]) + Fraction(top, bottom)) if bottom else None
    return None


def _fraction(digits: str) -> Fraction | None:
    digits = digits.replace(",", "").replace(" ", "").rstrip(".")
    return Fraction(digits) if re.search(r"\d", digits) else None


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
