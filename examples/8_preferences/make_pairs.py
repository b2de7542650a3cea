"""Write pairs for DPO: the answers with the highest and the lowest reward of each group in a run's log.

    streamrl stream runs/preferences --export preferences/samples.parquet
    python examples/8_preferences/make_pairs.py preferences/samples.parquet preferences/sampled_pairs.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet

SPECIAL = ("<sep>", "<eos>")  # what the tiny model's template puts after a question, and what ends an answer


def text(tokens: str) -> str:
    """The letters alone: the chat template of the trainer adds special tokens again."""
    for token in SPECIAL:
        tokens = tokens.replace(token, "")
    return tokens


def main(samples: str, pairs: str) -> None:
    columns = ["group_id", "prompt", "answer", "reward"]
    groups: dict[int, list[dict]] = {}
    for answer in pyarrow.parquet.read_table(samples, columns=columns).to_pylist():
        groups.setdefault(answer["group_id"], []).append(answer)

    lines = []
    for answers in groups.values():
        best, worst = (choose(answers, key=lambda answer: answer["reward"]) for choose in (max, min))
        record = {"question": text(best["prompt"]), "chosen": text(best["answer"]), "rejected": text(worst["answer"])}
        if best["reward"] > worst["reward"] and all(record.values()):  # the trainer refuses empty answers
            lines.append(json.dumps(record) + "\n")
    Path(pairs).write_text("".join(lines))
    print(f"{pairs}: {len(lines)} pairs of {len(groups)} groups")


if __name__ == "__main__":
    main(*sys.argv[1:])
