"""Write gsm8k_train.jsonl and gsm8k_test.jsonl: sums of reasoning_gym as records in the form of GSM8K.

python examples/6_gsm8k_format/make_data.py [DIRECTORY]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoning_gym


def record(question: str, answer: str) -> dict[str, str]:
    """A record as GSM8K has them: the worked answer, and after four hashes the result."""
    asked = f"State the final answer to the following arithmetic problem: {question} ="
    return {"question": asked, "answer": f"{question} = {answer}\n#### {answer}"}


def main(directory: str = ".") -> None:
    sums = reasoning_gym.create_dataset(
        "chain_sum", size=4000, seed=1, min_terms=2, max_terms=3, min_digits=1, max_digits=2,
    )
    pairs = {str(sum_["metadata"]["expression"]): str(sum_["answer"]) for sum_ in sums}  # each question once
    records = [record(question, answer) for question, answer in pairs.items()]
    for name, part in (("test", records[:200]), ("train", records[200:])):
        path = Path(directory) / f"gsm8k_{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in part))
        print(f"{path}: {len(part)} records")


if __name__ == "__main__":
    main(*sys.argv[1:])
