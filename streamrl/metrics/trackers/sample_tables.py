"""Samples as tables for trackers: one row each, the same columns in all of them."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.metrics.samples import Sample
from streamrl.metrics.text import compact

COLUMNS = (
    "kind", "step", "fate", "reward", "score", "advantage", "version", "lag", "num_tokens", "truncated", "prompt",
    "answer", "expected", "parts", "group", "member", "record", "actor",
)
MAX_MARKDOWN_CHARS = 2000
"""The limit for a prompt or an answer in a Markdown table."""
_SHOWN = str.maketrans({**{char: f"&#{ord(char)};" for char in "&<>\\`*_[]|#~"}, "\n": "<br>"})
"""Characters that Markdown or HTML would render, as themselves."""


def rows_of(samples: Sequence[Sample]) -> list[list[str | float | int | None]]:
    """One row for each sample, in the order of `COLUMNS`."""
    return [
        [", ".join(f"{name} {compact(part)}" for name, part in one.parts.items()) if name == "parts"
         else getattr(one, name) for name in COLUMNS]
        for one in samples
    ]


def markdown_of(samples: Sequence[Sample]) -> str:
    """The table as Markdown; what the model said is shown and never rendered."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows_of(samples)]
    return "\n".join(lines)


def _cell(value: str | float | int | None) -> str:
    if not isinstance(value, str):
        return "" if value is None else str(value) if isinstance(value, int) else compact(value)
    cut = value if len(value) <= MAX_MARKDOWN_CHARS else f"{value[:MAX_MARKDOWN_CHARS]}…"
    return cut.translate(_SHOWN)
