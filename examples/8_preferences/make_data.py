"""Write the records of this example and a tiny untrained model that reads their letters.

    python examples/8_preferences/make_data.py [DIRECTORY]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from learner.model.tiny import make_tiny_model

LETTERS = "abcdefgh"
NUM_TEST, NUM_TRAIN, NUM_ANSWERS, NUM_PAIRS = 200, 1000, 4000, 12000


def with_errors(text: str, rate: float, random_: random.Random) -> str:
    """A copy of the text in which each letter, with this probability, is replaced, left out or doubled."""
    letters = []
    for letter in text:
        if random_.random() >= rate:
            letters.append(letter)
        else:
            letters.append(random_.choice([random_.choice(LETTERS), random_.choice(LETTERS), "", 2 * letter]))
    return "".join(letters)


def main(directory: str = "preferences") -> None:
    random_ = random.Random(1)
    asked: set[str] = set()
    while len(asked) < NUM_TEST + NUM_TRAIN + NUM_ANSWERS + NUM_PAIRS:
        asked.add("".join(random_.choices(LETTERS, k=random_.randint(3, 6))))
    texts = sorted(asked)
    random_.shuffle(texts)

    def take(number: int) -> list[tuple[str, str]]:
        return [(text, text[::-1]) for text in (texts.pop() for _ in range(number))]

    files = {
        "test": [{"question": text, "answer": right} for text, right in take(NUM_TEST)],
        "train": [{"question": text} for text, _ in take(NUM_TRAIN)],
        # One letter in six is wrong: the trained model knows what an answer looks like, and errs.
        "answers": [
            {"question": text, "answer": with_errors(right, 1 / 6, random_)} for text, right in take(NUM_ANSWERS)
        ],
        "pairs": [
            {"question": text, "chosen": right, "rejected": wrong}
            for text, right in take(NUM_PAIRS)
            if (wrong := with_errors(right, 1 / 4, random_)) != right
        ],
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"{folder / name}.jsonl: {len(records)} records")
    print(make_tiny_model(folder / "model", characters=LETTERS))


if __name__ == "__main__":
    main(*sys.argv[1:])
