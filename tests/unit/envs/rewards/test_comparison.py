"""Answers are found in completions, and compared: as texts, as expressions, as outputs of programs."""

import json
import random
import sys
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.rewards.code import close, matches, same_value
from envs.rewards.extract import (
    ANSWER_TAGS,
    final_answer,
    has_format,
    last_answer_tag,
    last_boxed,
    last_code_block,
    last_hashes,
    last_number,
)
from envs.rewards.mathematics.equality import grade
from envs.rewards.registry import repeats_itself
from envs.tools.parsing import PARSERS, BadCall, ToolCall, parse_json

UNCLOSED = [
    r"\(", r"\[", r"\[ \(", "$$ ", "$a ", "$", r"\boxed{", r"\boxed1 ", r"\boxed ", r"\fbox{\(", "(1,", "{", "<answer>",
    "</answer>", "####", "= ", "1 + ", "```python ", "<tool_call>", "<function=a>", "<function=a><parameter=b>",
    "```json\n", "[1],", '{"name":', "<", '<tool_call>{"</tool_call>', "<tool_call>a<arg_key>b</arg_key><arg_value>",
    '[TOOL_CALLS]a[ARGS]["', "<tool_call>a<arg_key>", "[f(",
]


@pytest.mark.timeout(60)  # quadratic ones take several minutes each; the actor's loop stands meanwhile
@pytest.mark.parametrize("piece", UNCLOSED)
def test_what_a_model_opens_again_and_again_is_read_once(piece):
    text = piece * (400_000 // len(piece)) + " so it is 7"
    for find in (last_boxed, last_number, last_answer_tag, last_hashes, last_code_block, final_answer):
        found = find(text)
        assert find is not last_number or found.endswith("7") or "$" in piece, find
    assert all(isinstance(one, ToolCall | BadCall) for name, parse in PARSERS.items() if name != "angle"
               for one in parse(text, [])), "calls, or what the model reads of them"


def test_a_call_that_does_not_end_ends_before_the_next():
    two = '<function=a>{"x": 1} <function=b>{"y": 2}'
    assert parse_json(two, []) == [ToolCall("a", {"x": 1}), ToolCall("b", {"y": 2})]
    held = '<function=a>{"x": "<function=b>"}</function>'
    assert parse_json(held, []) == [ToolCall("a", {"x": "<function=b>"})]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed {3}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{3 + \boxed{4}}", r"3 + \boxed{4}"),
        (r"\boxed{4\}} and more", r"4\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\begin{pmatrix}1\\2\\\end{pmatrix}}", r"\begin{pmatrix}1\\2\\\end{pmatrix}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{" * 200_000, None),  # a degenerate answer must not take seconds
        (r"\boxed{" * 200_000 + "}" * 200_000, r"\boxed{" * 199_999 + "}" * 199_999),
        (r"\boxed{}", ""),
        ("42", None),
    ],
    ids=range(16),
)
def test_the_last_box_counts_if_it_is_closed(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>1</answer><answer>\n 2 \n</answer>", "2"),
        ("<answer>a <b> c</answer>", "a <b> c"),
        ("<answer>1", None),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("<answer>1</answer> 2</answer>", "1"),
        ("</answer><answer>1", None),
        ("<answer>" * 300_000, None),  # a degenerate answer must not take seconds
        ("<answer>" * 300_000 + "1</answer>", "<answer>" * 299_999 + "1"),
    ],
    ids=range(8),
)
def test_the_last_closed_answer_tag_counts(text: str, found: str | None) -> None:
    assert last_answer_tag(text) == found


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think><answer>1</answer>", True),
        ("x <think></think> y <answer>1</answer>", True),
        ("<think>a</think><answer>1</answer> more", False),
        ("<answer>1</answer><think>a</think>", False),
        ("<think>a</think><think>a</think><answer>1</answer>", False),
        ("<think>a</think><answer>1", False),
    ],
)
def test_format_is_each_tag_once_in_order_with_nothing_after_the_last(text: str, right: bool) -> None:
    assert has_format(text, ANSWER_TAGS) is right


@pytest.mark.parametrize(
    ("text", "program", "formatted"),
    [
        ("hi\n```python\nprint(1)\n```\nbye", "\nprint(1)\n", True),
        ("```python\na\n```\n```python\nb\n```", "\nb\n", True),
        ("```python\nprint(1)", "\nprint(1)", True),
        ("print(2)\n```\nx\n```", "print(2)\n", False),
        ("print(3)", "print(3)", False),
    ],
)
def test_the_last_python_fence_holds_the_program(text: str, program: str, formatted: bool) -> None:
    assert last_code_block(text) == (program, formatted)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from 3 to -1,234.5 apples.", "-1234.5"), ("3/4 of it", "3/4"), ("none", None), ("it is −5", "-5"),
        ("about .5", ".5"), ("They are 1,2,3", "1,2,3"), ("so 1.5e3", "1.5e3"), ("1.5 × 10^3", "1.5×10^3"),
        ("between 3-5", "3-5"), ("50%", "50%"), (r"50\% of them", r"50\%"), ("$18.50.", "18.50"), ("**18**", "18"),
        ("(25).", "25"), ("9 * 2 = 18", "18"), ("x = -5", "-5"), (r"it is \frac{1}{2}.", r"\frac{1}{2}"),
        (r"$\frac{1}{2} + x$", r"\frac{1}{2} + x"), ("costs $5 or $6", "6"), ("2x", "2x"), ("5 - 3", "5-3"),
        ("It is -3.", "-3"), ("18!", "18"), ("2x = 18", "2x=18"), ("(1, 2)", "(1,2)"), ("18 (or so)", "18"),
        ("10/4 = 2.5", "2.5"), ("20°", "20"), ("5cm", "5"), ("<answer> 7", "7"),
    ],
)  # fmt: skip
def test_the_last_number_is_read_with_all_that_it_is_a_part_of(text: str, found: str | None) -> None:
    assert last_number(text) == found


def test_what_follows_the_last_hashes_is_an_answer() -> None:
    assert last_hashes("1 + 1\n#### 2 \nwell") == "2"
    assert last_hashes("#### ") is None
    assert last_hashes("2") is None


def test_a_records_own_answer_may_hold_its_derivation() -> None:
    assert final_answer("2 + 2 = <<2+2=4>>4\n#### 4") == "4"
    assert final_answer(r"Thus $x = \boxed{\frac12}$.") == r"\frac12"
    assert final_answer(" 7 ") == "7"


# --- Values are equal or they are not, however near to each other; what takes too much to compute is undecided

pytest.importorskip("math_verify")
sympy = pytest.importorskip("sympy")
exact = pytest.importorskip("envs.rewards.mathematics.exact")

LEAVES = st.integers(-9, 99).map(lambda n: (f"({n})", Fraction(n))) | st.tuples(
    st.integers(1, 99), st.integers(1, 99)
).map(lambda pair: (rf"\frac{{{pair[0]}}}{{{pair[1]}}}", Fraction(*pair)))
JOINED = {
    "sum": lambda a, b: (f"({a[0]} + {b[0]})", a[1] + b[1]),
    "difference": lambda a, b: (f"({a[0]} - {b[0]})", a[1] - b[1]),
    "product": lambda a, b: (rf"{a[0]} \cdot {b[0]}", a[1] * b[1]),
    "quotient": lambda a, b: (rf"\frac{{{a[0]}}}{{{b[0]}}}", a[1] / b[1]) if b[1] else a,
}
TREES = st.recursive(
    LEAVES, lambda inner: st.builds(lambda how, a, b: JOINED[how](a, b), st.sampled_from(sorted(JOINED)), inner, inner),
    max_leaves=5,
)  # fmt: skip


def latex(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@given(TREES, st.integers(1, 80))
@settings(max_examples=30, deadline=None)
def test_rational_expressions_are_exact(tree: tuple[str, Fraction], places: int) -> None:
    text, value = tree
    assert grade(latex(value), text), (text, value)
    assert not grade(latex(value + Fraction(1, 10**places)), text)


@given(st.integers(2, 9), st.integers(50, 2000), st.integers(-2, 2), st.integers(-2, 2))
@settings(max_examples=25, deadline=None)
def test_whole_numbers_near_each_other(base: int, power: int, first: int, second: int) -> None:
    gold, answer = (rf"{base}^{{{power}}} + ({add})" for add in (first, second))
    assert grade(gold, answer) is (first == second)
    assert grade(gold, rf"{base}^{{{power - 1}}} \cdot {base} + {second + 9} - 9") is (first == second)


@given(st.integers(2, 30), st.integers(2, 30), st.integers(20, 300))
@settings(max_examples=15, deadline=None)
def test_roots_are_equal_or_differ_by_a_power_of_ten(a: int, b: int, places: int) -> None:
    gold, same = rf"(\sqrt{{{a}}} + \sqrt{{{b}}})^2", rf"{a + b} + 2\sqrt{{{a * b}}}"
    assert grade(gold, same)
    assert not grade(gold, rf"{same} + 10^{{-{places}}}")


@given(st.integers(30, 100_000))
@settings(max_examples=12, deadline=None)
def test_what_is_small_is_not_zero(power: int) -> None:
    for gold, answer in (("0", rf"e^{{-{power}}}"), ("1", rf"1 - e^{{-{power}}}"), ("1", rf"1 - 2^{{-{power}}}")):
        assert not grade(gold, answer) and not grade(answer, gold)


def unevaluated(text: str) -> object:
    return sympy.sympify(text, {"f": sympy.Function("f")}, evaluate=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [
    "9**9**9", "9**9**9**9", "factorial(10**9)", "binomial(10**12, 10**11)", "sqrt(9**9**9)", "exp(10**30)",
    "exp(exp(exp(10)))", "2**100000 * 3**100000 * 5**100000", "gamma(pi * 10**20)", "tanh(9**9)", "pi**(10**8)",
    "Sum(9**9**9, (k, 1, 3))", "1/0", "pi - 9**9**9",
])  # fmt: skip
def test_what_takes_too_much_is_undecided(text: str) -> None:
    with pytest.raises(exact.UndecidedError):
        exact.same(sympy.Integer(1), unevaluated(text))


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("x**2 - 1", "(x - 1)*(x + 1)", True),
        ("sqrt(x**2)", "x", False),
        ("sqrt(x**3)", "x*sqrt(x)", True),  # where both are real
        ("sqrt(-x**2 - 1)", "2*sqrt(-x**2 - 1)", False),
        ("asin(x)", "pi/2 - acos(x)", True),
        ("f(x) + 1", "1 + f(x)", True),
        ("f(2)", "f(3)", False),
        ("floor(x)", "floor(x + 1/10)", False),
        ("floor(x + 1)", "floor(x) + 1", True),
        ("Max(x, 3)", "x", False),
        ("1", "cos(10**(-40))", False),
        ("1", "cos(1 - cos(10**(-40)))", False),
        ("1", "cos(1 - cos(1 - cos(10**(-40))))", False),
        ("0", "sqrt(2)*sqrt(2) - 2", True),
        ("1", "cos(sqrt(2)*sqrt(2) - 2)", True),
        ("0", "sin(pi)", True),
        ("pi", "pi + exp(-300)", False),
        ("x**y", "y**x", False),
        ("factorial(n)", "n*factorial(n - 1)", True),
    ],
)
def test_functions_are_compared_at_several_points(gold: str, answer: str, equal: bool) -> None:
    assert exact.same(unevaluated(gold), unevaluated(answer)) is equal


# --- Comparisons without math-verify's parser, and those that need it. The tables are in `test_math_pairs`

SAME = [
    ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), ("1,000", "1000"), ("x=3", "3"), ("{1,2,3}", "3,2,1"),
    (r"\left(1,2\right)", "(1, 2)"), ("0.1", "1/10"), (r"\$5", "5"), ("3.0", "3"), ("}7{", "}7{"),
]  # fmt: skip
DIFFERENT = [
    ("3", "4"), ("(1,2)", "(2,1)"), ("hello", "3"), ("3", "hello"), ("1,2", "1,2,3"), ("1/3", "0.3333"), ("", "0"),
    ("", ""), ("7", "}7{"), ("}7{", "7"),
]  # fmt: skip


@pytest.fixture(params=["with math-verify", "without"])
def library(request, monkeypatch) -> None:
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "latex2sympy2_extended", None)
        monkeypatch.setitem(sys.modules, "latex2sympy2_extended.latex2sympy2", None)


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_what_is_the_same_is_the_same_with_and_without_the_library(library: None, gold: str, answer: str) -> None:
    assert grade(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_what_differs_differs_with_and_without_the_library(library: None, gold: str, answer: str) -> None:
    assert not grade(gold, answer)


def test_only_the_library_sees_equal_expressions(monkeypatch) -> None:
    pytest.importorskip("math_verify")
    assert grade(r"\sqrt{8}", r"2\sqrt{2}")
    assert grade("x^2 - 1", "(x-1)(x+1)")
    monkeypatch.setitem(sys.modules, "latex2sympy2_extended.latex2sympy2", None)
    assert not grade(r"\sqrt{8}", r"2\sqrt{2}")
    assert grade("x^2 - 1", "x^2-1")  # nothing reads it: the texts are equal


# --- Only real repetition is called so ---------------------------------------------------------

SENTENCE = "this sentence has a good deal more than eight words in it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", False),
        ("no no no no no no", False),
        ("a b c d e f g h " * 6, True),
        ("a b c d e f g h " * 5, False),
        (". ".join([SENTENCE] * 4), True),
        (". ".join([SENTENCE] * 3), False),
        (" ".join(map(str, range(1000))), False),
    ],
)
def test_repetition(text: str, found: bool) -> None:
    assert repeats_itself(text) is found


# --- From strict to lenient, and no further ----------------------------------------------------

@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        (" 1  2 \n\n3", "1 2\n3", True),
        ("1.0000001 x", "1.0 x", True),
        ("1.1", "1.0", False),
        ("1000001", "1000000", False),  # integers are equal or not, however large
        ("1 2", "2 1", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
        ("nan", "1", False),
        ("nan", "nan", True),
        ("9007199254740993", "9007199254740992", False),
        ("9007199254740993", "9007199254740993.0", True),
        ("9007199254740993", "9007199254740992.0", False),
        ("12345678901234567890", "1.2345678901234567e19", False),  # a float where integer arithmetic was the task
        ("1" + "0" * 400, "1" + "0" * 399 + "1", False),
        ("1" + "0" * 400, "1e400", True),
        ("1e400", "1e401", False),
        ("1e400", "inf", False),
        ("-inf", "inf", False),
        ("Infinity", "inf", True),
        ("1e-400", "-1e-400", True),  # as near to 0 as printed floats show
        ("1e999999999999999", "1", False),
        ("-7", "7", False),
        ("-0", "0", True),
        ("007", "7", True),
        ("1_0", "10", False),
        ("３", "3", False),  # noqa: RUF001  (a digit of another script)
        ("3.0000004", "3", True),
        ("1000000.4", "1000000", False),
        ("0x10", "16", False),
        ("YES", "yes", False),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert matches(output, expected) is same


def test_another_order_of_words_only_where_it_is_asked_for() -> None:
    assert matches("2 1\n3", "1 2\n3", any_order=True)
    assert not matches("2 1\n4", "1 2\n3", any_order=True)


WORDS = st.lists(st.sampled_from(["1", "2", "a", "bc"]), min_size=1, max_size=5)


@given(WORDS, WORDS)
def test_in_any_order_a_line_has_the_same_words_equally_often(output: list[str], expected: list[str]) -> None:
    same = Counter(output) == Counter(expected)
    assert matches(" ".join(output), " ".join(expected), any_order=True) is same


HUGE = st.integers(-(10**40), 10**40) | st.integers(0, 9).map(lambda last: 10**5000 + last)


def digits(value: int) -> str:
    """Like `str`, without Python's limit on the number of digits."""
    return f"{Decimal(value):f}"


@given(HUGE, st.integers(-3, 3))
def test_integers_near_each_other_are_the_same_only_if_they_are(value: int, apart: int) -> None:
    first, second = digits(value), digits(value + apart)
    assert matches(first, second) is (apart == 0)
    assert same_value(f"[[{first}], 1]", f"[[{second}], 1]") is (apart == 0)


@given(st.fractions(), st.fractions())
def test_decimals_differ_by_the_tolerance_and_no_more(left: Fraction, right: Fraction) -> None:
    written = [f"{float(value)!r}" for value in (left, right)]
    a, b = (Fraction(text) for text in written)
    most = max(Fraction("1e-5") * max(abs(a), abs(b)), Fraction("1e-8"))
    assert close(*written) is (abs(a - b) <= most)


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ("0.30000000000000004", "0.3", True),
        ("[0.30000000000000004, [1]]", "[0.3, [1]]", True),
        ('{"a": [0.30000000000000004]}', '{"a": [0.3]}', True),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        ("[0.31]", "[0.3]", False),
        ("3.0", "3", True),
        ("3", "[3]", True),
        ("[3]", "3", False),
        ("[[3]]", "[3]", False),
        ("1", "true", False),
        ("true", "1", False),
        ("[true]", "[1]", False),
        ("0", "false", False),
        ("0", "null", False),
        ('"1"', "1", False),
        ('"ab"', "ab", True),
        ('"0.30000000000000004"', '"0.3"', False),
        ("NaN", "NaN", True),
        ('"NaN"', "NaN", False),
        ("Infinity", "1e400", False),
        ("[]", "{}", False),
        ("[1, 2]", "[1]", False),
        ('{"a": 1}', '{"b": 1}', False),
        ("[" * 100_000, "[]", False),
    ],
)
def test_returned_values(returned: str, expected: str, same: bool) -> None:
    assert same_value(returned, expected) is same


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3), max_leaves=6,
)  # fmt: skip
OTHERS = [None, True, False, 0, 1, "1", [], {}, [1], 10**20, 10**20 + 1]


@given(VALUES, st.sampled_from(OTHERS), st.sampled_from(OTHERS), st.randoms(use_true_random=False))
def test_containers_are_the_same_if_all_that_they_hold_is(value: object, one: object, two: object, rng: random.Random):
    shapes = [lambda x: [value, x], lambda x: {"k": x, "v": value}, lambda x: [[[x]], value]]
    shape = rng.choice(shapes)
    first, second = json.dumps(shape(one)), json.dumps(shape(two))
    assert same_value(first, second) is (first == second)
