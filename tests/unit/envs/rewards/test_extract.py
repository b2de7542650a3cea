"""Answers are found where the ancestors of these rewards found them."""

import pytest

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
