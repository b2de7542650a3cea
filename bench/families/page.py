"""The last part of docs/models.md, out of the results: `python -m bench.families.page` writes it again."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "families"
PAGE = ROOT / "docs" / "models.md"
_BEGINNING = "Of the "
_HEADER = "| | families |\n|---|---|\n"


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Family -> its line; nothing where there is no file."""
    texts = path.read_text().splitlines() if path.exists() else []
    return {line["family"]: line for line in map(json.loads, texts)}


def generated(native: dict[str, dict[str, Any]], vllm: dict[str, dict[str, Any]]) -> str:
    """Number of families of each kind, and a table with a row for each result and reason."""
    counts = Counter(line["result"] for line in native.values())
    version = next(iter(native.values()))["transformers"].rpartition(".")[0]
    with_lora = sum(line.get("lora") == "" for line in native.values())
    summary = (
        f"{_BEGINNING}{len(native)} families of causal language models in transformers {version}, {counts['exact']} "
        f"are exact, {with_lora} of them with LoRA too; {counts['refused']} are refused by name before a run starts, "
        f"{counts['failed']} fail after that, and of {counts['not proved']} no tiny model could be made. "
        f"{sum(line['result'] == 'exact' for line in vllm.values())} are exact in vLLM's build for a CPU.\n\n"
    )
    rows: dict[str, list[str]] = {}
    for name, line in sorted(native.items(), key=lambda one: (ORDER.index(one[1]["result"]), one[0])):
        for row in _rows_of(line, vllm.get(name, {})):
            rows.setdefault(row, []).append(f"`{name}`")
    ordered = sorted(rows, key=lambda row: [row.startswith(kind) for kind in KINDS].index(True))
    return summary + _HEADER + "".join(f"| {row} | {', '.join(rows[row])} |\n" for row in ordered)


ORDER = ("exact", "refused", "not proved", "failed")
KINDS = ("**exact**", "exact,", "vLLM", "**refused**", "**not proved**", "**failed**")
"""Beginnings of the rows, in the order of the table."""


def _rows_of(line: dict[str, Any], vllm: dict[str, Any]) -> list[str]:
    """The first cells of the rows that name a family."""
    reason = _without_details(line["reason"])
    if line["result"] != "exact":
        return [f"**{line['result']}**: {reason}"]
    no_lora = line["lora"] and f"exact, but without LoRA: {_without_details(line['lora'])}"
    rows = [no_lora or "**exact**, with LoRA too"]
    if line["untrained"]:
        rows.append("exact, with weights that stay frozen")
    if len(line["embeddings"]) != 2:
        rows.append(f"exact, with {line['embeddings'][0]} embeddings only")
    if vllm:
        other = "vLLM does not start" if "did not start" in vllm["reason"] else "refused: take actors.engine=native"
        rows.append(f"vLLM on a CPU: {'exact' if vllm['result'] == 'exact' else other}")
    return rows


def _without_details(reason: str) -> str:
    """The first clause of a reason, without what differs between families that have it in common."""
    short = re.split(r"[:,] ", reason.removeprefix("policy.lora.rank: ").removeprefix("ValueError: "))[0]
    return re.sub(r" \([^()]*\)\.?$", "", short).replace("|", "\\|")


def main() -> None:
    """Write the generated part of the page."""
    text = PAGE.read_text()
    before = text[: text.rindex(f"\n{_BEGINNING}") + 1]
    PAGE.write_text(before + generated(*(read_lines(RESULTS / f"{engine}.jsonl") for engine in ("native", "vllm"))))


if __name__ == "__main__":
    main()
