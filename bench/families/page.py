"""The last part of docs/models.md, out of the results: `python -m bench.families.page` writes it again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "families"
PAGE = ROOT / "docs" / "models.md"
_BEGINNING = "Of the "
_HEADER = "| family | learner and native engine | LoRA | vLLM on a CPU | |\n|---|---|---|---|---|\n"


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Family -> its line; nothing where there is no file."""
    texts = path.read_text().splitlines() if path.exists() else []
    return {line["family"]: line for line in map(json.loads, texts)}


def generated(native: dict[str, dict[str, Any]], vllm: dict[str, dict[str, Any]]) -> str:
    """Number of families of each kind, and the table."""
    counts = Counter(line["result"] for line in native.values())
    version = next(iter(native.values()))["transformers"].rpartition(".")[0]
    summary = (
        f"{_BEGINNING}{len(native)} families of causal language models in transformers {version} {counts['exact']} are "
        f"exact, {sum(line.get('lora') == '' for line in native.values())} of them with LoRA, too; {counts['refused']} "
        f"are refused by name before a run starts, {counts['failed']} fail after that, and of {counts['not proved']} "
        f"no tiny model could be made. {sum(line['result'] == 'exact' for line in vllm.values())} are exact in vLLM's "
        "build for a CPU.\n\n"
    )
    rows = []
    for name, line in sorted(native.items()):
        other = vllm.get(name, {})
        notes = [line["reason"], *_notes(line), other.get("reason", "") and f"vLLM: {other['reason']}"]
        cells = (f"`{name}`", line["result"], _lora(line), other.get("result", ""), "; ".join(filter(None, notes)))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return summary + _HEADER + "".join(rows)


def _lora(line: dict[str, Any]) -> str:
    if line["result"] != "exact":
        return ""
    return "refused" if line["lora"] else "exact"


def _notes(line: dict[str, Any]) -> list[str]:
    if line["result"] != "exact":
        return []
    kinds = (("buffers", "saved buffer"), ("untrained", "frozen weight"))
    saved = [f"{line[kind]} {word}{'s' * (line[kind] > 1)}" for kind, word in kinds if line[kind]]
    only = [] if len(line["embeddings"]) == 2 else [f"{line['embeddings'][0]} embeddings only"]
    why = (line["lora"] or "").partition(": leave")[0].removeprefix("policy.lora.rank: ")
    return [*([f"with {' and '.join(saved)}"] if saved else []), *only, *([f"LoRA: {why}"] if why else [])]


def main() -> None:
    """Write the generated part of the page."""
    text = PAGE.read_text()
    before = text[: text.rindex(f"\n{_BEGINNING}") + 1]
    PAGE.write_text(before + generated(*(read_lines(RESULTS / f"{engine}.jsonl") for engine in ("native", "vllm"))))


if __name__ == "__main__":
    main()
