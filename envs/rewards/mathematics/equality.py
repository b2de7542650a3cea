"""Equality of two mathematical answers. Texts are taken apart here, and `exact` compares their expressions.

Everything is a function of two texts: nothing keeps state, and nothing limits time (`math_worker` does).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

from envs.rewards.mathematics.text import (
    CURRENCY,
    RELATION,
    TRIGONOMETRY,
    bare,
    choice,
    chosen,
    clean,
    number,
    parts,
    without_choice,
    words,
)

PERCENT = "%"
_NAMES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "inch": "in inche", "foot": "ft feet", "yard": "yd", "mile": "mi", "mg": "milligram", "g": "gram gm",
    "kg": "kilogram kilo", "pound": "lb £", "ounce": "oz", "ton": "tonne", "second": "s sec", "minute": "min",
    "hour": "h hr", "day": "", "week": "", "month": "", "year": "yr", "l": "liter litre", "ml": "milliliter",
    "degree": r"deg ^\circ °", "radian": "rad", "dollar": f"{CURRENCY} $ usd buck", "euro": "€", "cent": "¢",
    "unit": "", "newton": "n", "joule": "j", "watt": "w", "volt": "v", "kelvin": "k", "hertz": "hz", "mile/hour": "mph",
    "km/hour": "kmh kph", "am": "", "pm": "",
    PERCENT: r"\% percent pct percentage",
}  # fmt: skip
UNITS = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases.split())}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CHANGES = {"and", "or", "plus", "minus", "times", "half", "third", "quarter", "over", "dozen", "to", "x", "not"} | set(
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty halves thirds "
    "fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths millionths".split()
)
"""Words after a number that make it another one: what they say is not read."""
_TEXT = r"\\text\{(?:[^{}\d^]|\^\s*\{?-?\d\}?)*\}"
_WORD = rf"(?:{_TEXT}|(?<![\\A-Za-z])[A-Za-z]{{2,}}|(?<=[ /])[msghlLNJWVK](?![A-Za-z]))"
_SUFFIX = re.compile(
    rf"\s*((?:\\?%|[{CURRENCY}€£¢]|"
    rf"\^\s*\\circ\s*(?:\\text\{{\s*)?[CF]?\}}?|{_WORD})(?:\s*(?:/|\\cdot|\^\s*\{{?-?\d\}}?|{_WORD}))*)\.?$"
)
_PREFIX = re.compile(rf"^([+-]?)\s*([{CURRENCY}€£])\s*(?=[+-]?\s*[\d.])")


class Quantity(NamedTuple):
    """A value without its unit. An empty unit is none, or a noun: apples and eggs count alike."""

    value: str
    unit: str


def quantity(text: str) -> Quantity:
    """The value and unit of one item of an answer."""
    unit = ""
    if found := _PREFIX.match(text):
        text, unit = found[1] + text[found.end() :], UNITS[found[2]]
    found = _SUFFIX.search(text)
    if not found or not text[: found.start()].strip():
        return Quantity(text, unit)
    value, suffix = text[: found.start()].strip(), found[1]
    if r"\circ" in suffix and TRIGONOMETRY.search(value):
        return Quantity(text, unit)  # an angle of the function, not the unit of its value
    plain = re.sub(_TEXT, lambda found: f" {found[0][6:-1]} ", suffix).strip()
    if plain == suffix and number(value) is None and suffix not in ("%", r"\%") and r"\circ" not in suffix:
        return Quantity(text, unit)  # letters after an expression are factors of it
    names = re.findall(r"\\?%|\^\s*\\circ|\^\s*\{?-?\d\}?|[^\W\d_]+|[/£€¢$¤]", plain.lower().replace(r"\cdot", " "))
    changed = _CHANGES & set(names) or names[:1] in (["squared"], ["cubed"])
    if changed or (plain == suffix and not _stands_alone(text[found.start() :], names)):
        return Quantity(text, unit)
    scales = [_SCALES[name.removesuffix("s")] for name in names if name.removesuffix("s") in _SCALES]
    if scales:
        value = f"{value} \\cdot 10^{{{sum(scales)}}}"
        names = [name for name in names if name.removesuffix("s") not in _SCALES]
    return Quantity(value, unit or _unit(names))


def _stands_alone(suffix: str, names: list[str]) -> bool:
    """Whether plain letters are words: a known unit, or a noun after a space; 4yx^2 is a product."""
    nouns = [name for name in names if name[0].isalpha() and not _unit([name])]
    return not nouns or (suffix[0] == " " and "^" not in suffix and min(map(len, nouns)) > 2)


def _unit(names: list[str]) -> str:
    """One spelling of known units and their powers, whatever their order; "" where a word is not known."""
    powers: Counter[str] = Counter()
    last, power, sign = "", 1, 1
    for name in names:
        name = re.sub(r"[\s{}]", "", name)
        if name in ("/", "per"):
            sign = -1
        elif name in ("squared", "cubed") or re.fullmatch(r"\^-?\d", name):
            if not last:
                return ""
            powers[last] += sign * (int(_POWERS.get(name, name)[1:]) - 1)
        elif name in _POWERS:
            power = int(_POWERS[name][1:])
        elif known := UNITS.get(name) or UNITS.get(name.removesuffix("s")) or (name in "cf" and name):
            for part, direction in zip(known.split("/"), (sign, -sign), strict=False):
                last = part
                powers[part] += direction * power
            power = 1
        else:
            return ""
    return " ".join(name if number == 1 else f"{name}^{number}" for name, number in sorted(powers.items()) if number)


_NAME = r"(?:\\?[a-zA-Z]+|\\text\{[^{}]*\})(?:_\w|_\{\w+\})?'?(?:\([a-z](?:, ?[a-z])*\))?|\([a-z](?:, ?[a-z])+\)"
_ASSIGNMENT = re.compile(rf"({_NAME})\s*(?:=|\\in(?![a-zA-Z]))\s*(.+)")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq)(?![a-zA-Z])")
_JOINED = re.compile(r"\s*\\(lor|land)(?![a-zA-Z])\s*")
_REALS = re.compile(r"(?:\\mathbb\s*\{?\s*R\s*\}?|\\Reals|\\R)(?:\s*(?:\\setminus|\\backslash|-)\s*\\\{(.*)\\\})?")
_ALL_REALS = ("all real numbers", "all reals", "the real numbers", "real numbers", "the set of all real numbers")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|(?<![a-zA-Z\\])[a-z]|\\(?:theta|alpha|beta)\s*)\s*\^\s*\\circ")
_EQUALS = re.compile(r"(?<![<>!\\])=(?![^{}]*(?<!\\)\})")
"""Not that of the index of a sum."""
_MISREAD = re.compile(r"(?<!_)\d\s+\d|\d_|:.*:|\\pmod|\\ldots|\\binom\{?\d{6}")
"""Notation that math-verify's parser takes for something else: 1 2 for a sum, 11_2 for 11, 1:2:3 for one number."""
_FACTORS = re.compile(r"(?<![\w^.\\])(\d+(?:\.\d+)?)\s*(?=[({])|(?<=\))\s*(?=\()")
"""2(4) and (2)(4) are products, and its sums."""
_RANGE = re.compile(r"(\d+)\s*-+\s*(\d+)")
MAX_CHARS = 5_000
_UNORDERED = {",", "{}", "cup"}


def grade(gold: str, answer: str) -> bool:
    """Whether `answer` is the same as `gold`.

    Numbers and expressions are compared exactly, lists item by item. Texts are compared where one of them cannot be
    read, or is too long to be an answer.
    """
    if max(len(gold), len(answer)) > MAX_CHARS:
        return bare(gold) == bare(answer)
    gold, answer = _stated(clean(gold)), _stated(clean(answer))
    return bool(gold) and _same(gold, answer)


def _stated(text: str) -> str:
    """The value that is said to be approximately something; of a name, and of nothing, that something."""
    pieces = [piece.strip() for piece in _APPROXIMATELY.split(text)]
    if len(pieces) != 2 or parts(text)[1] != [text]:
        return text
    if not pieces[0]:
        return pieces[1]
    is_name = re.fullmatch(_NAME, pieces[0]) and pieces[0] not in (r"\pi", "e")
    return " = ".join(pieces) if is_name else pieces[0]


def _same(gold: str, answer: str) -> bool:
    if bare(gold) == bare(answer):
        return True
    if None not in (letters := (choice(gold), choice(answer))):
        return letters[0] == letters[1]
    answer = without_choice(answer)
    if letters[0] is not None and (told := chosen(gold)) != gold:
        return _same(told, answer)
    gold, answer = _without_reals(gold), _without_reals(answer)
    if (texts := (words(gold), words(answer))) != (None, None):
        return texts[0] == texts[1]
    if (intervals := _intervals(gold, answer)) is not None:
        return intervals
    if (joints := [set(_JOINED.findall(text)) for text in (gold, answer)])[0] != joints[1] and all(joints):
        return False
    if RELATION.search(gold + answer):
        gold, answer = (_JOINED.sub(", ", text) for text in (gold, answer))
    named, given = _assignment(gold), _assignment(answer)
    if named or given:
        return _same_equations(gold, answer, named, given)
    (kind, golds), (given_kind, givens) = parts(gold), parts(answer)
    if (kind, given_kind) == (",", ",") and len(givens) == 1 < len(golds):
        givens = answer.split(",")  # 100,200 may be two numbers, if two are asked for
    if len(golds) != len(givens) or not _alike(kind, given_kind):
        return False
    if (kind, given_kind) == (",", ",") and len(golds) == 1:
        return _same_equations(golds[0], givens[0], None, None)
    if {kind, given_kind} <= _UNORDERED:
        return _same_sets(golds, givens)
    return _names_differ(golds) and _names_differ(givens) and all(map(_same, golds, givens))


def _names_differ(items: list[str]) -> bool:
    """Whether this may be a point: x=1, x=2 are two values of one name."""
    names = [found[0] for item in items if (found := _assignment(item))]
    return len(set(names)) == len(names)


def _alike(kind: str, given: str) -> bool:
    """Brackets must agree; a bare list may stand for a set, and for a point in the order of its items."""
    return kind == given or {kind, given} in ({",", "{}"}, {",", "()"})


def _same_sets(golds: list[str], givens: list[str]) -> bool:
    left = list(givens)
    for gold in golds:
        match = next((given for given in left if _same(gold, given)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _intervals(gold: str, answer: str) -> bool | None:
    """Compare inequalities in one variable as intervals, also with a written interval; None if there are none."""
    found = _solutions(gold), _solutions(answer)
    if found == (None, None):
        return None
    if None not in found:
        return found[0][0] == found[1][0] and _same(found[0][1], found[1][1])
    other, (name, text) = (gold, found[1]) if found[0] is None else (answer, found[0])
    if (named := _assignment(other)) and named[0] == name:
        other = _without_reals(named[1])
    if parts(other)[0] == "," and len(parts(other)[1]) > 1:
        return None  # a list says neither "and" nor "or"
    return parts(other)[0] in ("()", "(]", "[)", "[]", "cup") and _same(other, text)


def _solutions(text: str) -> tuple[str, str] | None:
    """Inequalities in one variable as an interval; joined by "or" as a union, and two of them by "and" as one."""
    found: list[tuple[str, str]] = []
    for piece in re.split(r"\\lor(?![a-zA-Z])", text):
        both = [_interval(part.strip()) for part in re.split(r"\\land(?![a-zA-Z])", piece)]
        if None in both or len(both) > 2 or len({name for name, _ in both}) > 1:
            return None
        if len(both) == 2:
            low, high = sorted((interval for _, interval in both), key=lambda one: one.startswith(r"(-\infty,"))
            if not low.endswith(r", \infty)") or not high.startswith(r"(-\infty, "):
                return None
            both = [(both[0][0], low.removesuffix(r", \infty)") + high.removeprefix(r"(-\infty"))]
        found += both
    one_name = len({name for name, _ in found}) == 1
    return (found[0][0], r" \cup ".join(interval for _, interval in found)) if one_name else None


def _without_reals(text: str) -> str:
    r"""\mathbb{R} as (-\infty, \infty), and without some numbers as the union of what is left."""
    if found := _REALS.fullmatch(text):
        holes = parts(found[1] or "")[1]
        if all(number(hole) is not None for hole in holes):
            ends = [r"-\infty", *sorted(holes, key=number), r"\infty"]
            return r" \cup ".join(f"({low}, {high})" for low, high in pairwise(ends))
    return r"(-\infty, \infty)" if words(text) in _ALL_REALS else text


def _interval(text: str) -> tuple[str, str] | None:
    """x > 5 as ("x", "(5, \\infty)"), and -1 < x \\le 3 as ("x", "(-1, 3]")."""
    if found := re.fullmatch(r"(\\?[a-zA-Z]+)\s*\\ne\s*([^<>=]+)", text):
        return found[1], rf"(-\infty, {found[2]}) \cup ({found[2]}, \infty)"
    signs, sides = RELATION.findall(text), [side.strip() for side in RELATION.split(text)]
    if not signs or not all(sides) or len({sign in ("<", r"\le") for sign in signs}) != 1:
        return None
    if signs[0] in (">", r"\ge"):
        signs, sides = ["<" if sign == ">" else r"\le" for sign in reversed(signs)], sides[::-1]
    if len(sides) == 2:
        is_name = [re.fullmatch(r"\\?[a-zA-Z]+", side) is not None for side in sides]
        if is_name == [True, False]:
            signs, sides = ["<", *signs], [r"-\infty", *sides]
        elif is_name == [False, True]:
            signs, sides = [*signs, "<"], [*sides, r"\infty"]
    if len(sides) != 3 or not re.fullmatch(r"\\?[a-zA-Z]+", sides[1]):
        return None
    return sides[1], f"{'([' [signs[0] != '<']}{sides[0]}, {sides[2]}{')]' [signs[1] != '<']}"


def _assignment(text: str) -> tuple[str, str] | None:
    """The name and the value of x = 5, x = 2 + 3 = 5 or x \\in [0, 1]; None for another equation, and for a list."""
    found = _ASSIGNMENT.fullmatch(text)
    return (bare(found[1]), found[2]) if found and parts(text)[1] == [text] else None


def _same_equations(gold: str, answer: str, named: tuple[str, str] | None, given: tuple[str, str] | None) -> bool:
    """x = 5 is 5, and y = 2x + 1 is 2x + 1; an equation that names no value is only another equation."""
    if named and given and named[0] == given[0]:
        return _same(_last_side(named[1]), given[1])
    if named and not _EQUALS.search(answer):
        return _same(_last_side(named[1]), answer)
    if given and not _EQUALS.search(gold):
        return _same(gold, given[1])
    sides = _EQUALS.split(answer)
    if len(sides) > 1 and not _EQUALS.search(gold):
        return all(_same(gold, side.strip()) for side in sides)
    return _same_quantities(gold, answer)


def _last_side(text: str) -> str:
    return _EQUALS.split(text)[-1].strip()


def _same_quantities(gold: str, answer: str) -> bool:
    """A unit that only one of them has is left out, and two that differ are wrong; a percent sign is one hundredth."""
    (gold, unit), (answer, given) = quantity(gold), quantity(answer)
    percent, given_percent = unit == PERCENT, given == PERCENT
    if percent != given_percent:
        left, right = number(gold), number(answer)
        if left is None or right is None or (unit and given):
            return False
        if percent:  # the question asks for percent: 50% may be given as 50 or as 0.5
            return right in (left, left / 100)
        return left == right / 100 or (left == right and left > 1)
    if {unit, given} == {"degree", ""} and r"\pi" in gold + answer:  # one side counts in radians
        radians = r"(%s) \cdot \frac{\pi}{180}"
        gold, answer = radians % gold if unit else gold, radians % answer if given else answer
    return not (unit and given and unit != given) and _same_values(gold, answer)


def _same_values(gold: str, answer: str) -> bool:
    numbers = number(gold), number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold is None or parsed_answer is None:
        return bare(gold) == bare(answer)
    with contextlib.suppress(Exception):  # undecided is unequal
        return _verify(parsed_gold, parsed_answer)
    return False


def _parse(text: str) -> Any:
    """Parse with math-verify, with exact numbers; None if it cannot, or is not installed."""
    if TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", text)
        if r"\circ" in text:
            return None
    ends = _RANGE.fullmatch(text)
    if _MISREAD.search(text) or (ends and int(ends[1]) < int(ends[2])):  # 3-5 is no difference
        return None
    try:
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
        from sympy import Derivative, Float, I, Rational, Symbol, nan, zoo
        from sympy.logic.boolalg import BooleanAtom
    except ImportError:
        return None
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    with contextlib.suppress(Exception):  # a parser of arbitrary text: whatever it raises, the text is not readable
        found = latex2sympy(
            _FACTORS.sub(r"\1 \\cdot ", text), is_real=None,
            normalization_config=rules, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
        if found.has(Derivative, zoo, nan):
            return None  # dy/dx is no derivative to be taken, which would be zero, and 1/0 no value
        exact = {value: Rational(str(value)) for value in found.atoms(Float)}
        found = found.subs(exact | {Symbol("i"): I}) if exact or Symbol("i") in found.free_symbols else found
        return None if isinstance(found, BooleanAtom) else found  # 2.5 = 2.5 is no more than true
    return None


def _verify(gold: Any, answer: Any) -> bool:
    """Two expressions are compared exactly; relations and sets by math-verify, whose parts are."""
    from math_verify import grader
    from math_verify.grader import solve
    from sympy import Expr, MatrixBase
    from sympy.core.relational import Relational

    from envs.rewards.mathematics.exact import same

    def solutions(*args: Any, **options: Any) -> Any:
        if not (found := solve(*args, **options)):
            raise ValueError("nothing solves it")
        return found

    def same_part(left: Any, right: Any, *_: Any) -> bool:
        if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
            return left.shape == right.shape and all(map(same, left.flat(), right.flat()))
        return isinstance(left, Expr) and isinstance(right, Expr) and same(left, right)

    if isinstance(gold, Expr | MatrixBase) and isinstance(answer, Expr | MatrixBase):
        return same_part(gold, answer)
    both = isinstance(gold, Relational) and isinstance(answer, Relational)
    if both and not (gold.free_symbols and answer.free_symbols):  # 2 + 2 = 4 and 1 = 1 are both true, and differ
        return type(gold) is type(answer) and all(map(same_part, gold.args, answer.args))
    # It takes all that is nearer to zero than 1e-15 for equal, and equations without solutions.
    with patch.multiple(grader, sympy_numeric_eq=same_part, sympy_symbolic_eq=same_part, solve=solutions):
        return bool(grader.verify([gold], [answer], timeout_seconds=None))
