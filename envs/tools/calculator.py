"""Arithmetic on what a model wrote: the text is parsed, and only numbers, operators and a few functions are known."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from envs.tools.tool import ToolError

MAX_CHARS = 1000
MAX_BITS = 4096
"""Largest whole number; a power that would be larger is not computed."""
WRITTEN = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}  # noqa: RUF001  (what models write for the operators)


def _quotient(a: Any, b: Any) -> Any:
    """Two whole numbers give the exact one."""
    return Fraction(a, b) if isinstance(a, int | Fraction) and isinstance(b, int | Fraction) else a / b


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _quotient,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
SIGNS: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator:
    """The value of one expression."""

    name = "calculator"
    description = f"Compute an arithmetic expression: + - * / // % **, parentheses, {', '.join(FUNCTIONS)}."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (3 + 4) * 12"}},
        "required": ["expression"],
    }

    def call(self, arguments: Mapping[str, Any]) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """The value as text: whole numbers exactly, others with 12 digits. Raises ToolError."""
    value = evaluate(expression)
    return str(int(value)) if _is_whole(value) else f"{float(value):.12g}"


def evaluate(expression: str) -> int | Fraction | float:
    """The value, exactly unless the expression holds decimals, roots or other functions. Raises ToolError."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are computed.")
    for written, meant in WRITTEN.items():
        expression = expression.replace(written, meant)
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        float(0 if isinstance(value, int) else value)  # how it is printed
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r:.80} is not an arithmetic expression.") from None
    except ZeroDivisionError:
        raise ToolError("division by zero.") from None
    except (ArithmeticError, TypeError) as error:
        raise ToolError(f"{expression!r:.80} cannot be computed: {error}.") from None
    return value


def _is_whole(value: int | Fraction | float) -> bool:
    """Whether a value is written without a decimal point."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) < 1e15
    return value.denominator == 1


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            value = SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and isinstance(a, int | Fraction) and isinstance(b, int):
                _check_size(abs(b) * _num_bits(a))
                a = Fraction(a)  # also to a negative power exactly
            value = OPERATORS[type(op)](a, b)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            value = FUNCTIONS[name](*map(_value, args))
        case ast.Name(id=name) if name in CONSTANTS:
            value = CONSTANTS[name]
        case _:
            raise ToolError(f"{ast.unparse(node)!r:.60} is not arithmetic: use numbers, + - * / // % ** and functions.")
    if isinstance(value, complex):
        raise ToolError("the result is not a real number.")
    if isinstance(value, int | Fraction):
        _check_size(_num_bits(value))
        value = value.numerator if value.denominator == 1 else value
    elif not math.isfinite(value):
        raise ToolError("the result is too large.")
    return value


def _num_bits(value: int | Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_size(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise ToolError(f"the result is too large: whole numbers may have {MAX_BITS} bits.")
