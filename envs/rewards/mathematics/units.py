r"""Units, percent signs and currencies at a value: 5\text{ cm}^2, 18 dollars, \$5, 50\%, 90^\circ."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from envs.rewards.mathematics.text import CURRENCY, TRIGONOMETRY, number

PERCENT = "%"
_NAMES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "inch": "in inche", "foot": "ft feet", "yard": "yd", "mile": "mi", "mg": "milligram", "g": "gram gm",
    "kg": "kilogram kilo", "pound": "lb £", "ounce": "oz", "ton": "tonne", "second": "s sec", "minute": "min",
    "hour": "h hr", "day": "", "week": "", "month": "", "year": "yr", "l": "liter litre", "ml": "milliliter",
    "degree": r"deg ^\circ °", "radian": "rad", "dollar": f"{CURRENCY} $ usd buck", "euro": "€", "cent": "¢",
    "unit": "", "newton": "n", "joule": "j", "watt": "w", "volt": "v", "kelvin": "k", "hertz": "hz", "mile/hour": "mph",
    "km/hour": "kmh kph",
    PERCENT: r"\% percent pct percentage",
}  # fmt: skip
UNITS = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases.split())}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CHANGES = {"and", "or", "plus", "minus", "times", "half", "third", "quarter", "over", "dozen", "to", "x", "not"} | set(
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty".split()
)
"""Words after a number that make it another one: what they say is not read."""
_TEXT = r"\\text\{(?:[^{}\d^]|\^\s*\{?-?\d\}?)*\}"
_WORD = rf"(?:{_TEXT}|(?<![\\A-Za-z])[A-Za-z]{{2,}}|(?<=[ /])[msghlLNJWVK](?![A-Za-z]))"
_SUFFIX = re.compile(
    rf"\s*((?:\\?%|\^\s*\\circ\s*(?:\\text\{{\s*)?[CF]?\}}?|{_WORD})(?:\s*(?:/|\\cdot|\^\s*\{{?-?\d\}}?|{_WORD}))*)\.?$"
)
_PREFIX = re.compile(rf"^([+-]?)\s*([{CURRENCY}€£])\s*(?=[\d.])")


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
    names = re.findall(r"\\?%|\^\s*\\circ|\^\s*\{?-?\d\}?|[^\W\d_]+|[/£€¢$]", plain.lower().replace(r"\cdot", " "))
    if _CHANGES & set(names) or (plain == suffix and not _stands_alone(text[found.start() :], names)):
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
