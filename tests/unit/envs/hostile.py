"""Answers that would leave a mark if they were run, or stall what evaluates them; a program scores data sets with them.

    python -m tests.unit.envs.hostile FOLDER FILE [NAME ...]    every data set of reasoning_gym, or those of these names

FILE gets a JSON line of findings for each. PYTHONHASHSEED must be set: some data sets draw from Python's own sets.
"""

import json
import os
import sys
from collections.abc import Iterable

MARK = "STREAMRL_HOSTILE_MARK"
STALL_S = 0.3
"""Longest time of one score here."""


def marks(folder: str) -> list[str]:
    """Python that writes into `folder`, or sets the environment variable MARK."""
    made = f"{folder}/mark"
    return [
        f"open({made!r}, 'w').close()",
        f"__import__('os').mkdir({made!r})",
        f"[__import__('os').environ.__setitem__({MARK!r}, '1')]",
        f"(1).__class__.__base__.__subclasses__() and open({made!r}, 'w')",
        f"sympify(\"open({made!r}, 'w')\")",
        f"sin(\"open({made!r}, 'w')\")",
        f"[x for x in [__import__('subprocess').run(['touch', {made!r}])]]",
        f"\\boxed{{open({made!r}, 'w')}}",
        f"{{\"a\": \"open({made!r}, 'w')\"}}",
    ]


STALLS = [
    "9**9**9**9",
    "factorial(10**8)",
    "10**9!",
    "(" * 5000 + "1" + ")" * 5000,
    "[" * 5000 + "]" * 5000,
    "-" * 20000 + "1",
    "9" * 5000 + "**2",
    "1+" * 3000 + "1",
    "x^{" * 3000 + "}" * 3000,
    "\\boxed{" + "\\frac{9^{9^{9^9}}}{" * 10 + "1" + "}" * 11,
    "(x+1)**10000000",
    "1e999999999",
    "a" * 1_000_000,
    "1," * 500_000,
    "<answer>" * 60_000,
    "<search>" * 60_000,
    "\\boxed{" * 60_000,
    "((x)" * 100_000,
]


FORMS = "{}", "<answer>{}</answer>", "\\boxed{{{}}}", "<think>1</think><answer>{}</answer>", "```python\n{}\n```"
"""Bare, and where rewards look for an answer."""


def in_every_form(texts: Iterable[str]) -> list[str]:
    return [form.format(text) for text in texts for form in FORMS]


def main() -> None:
    from envs.rewards.workers import WorkerPool
    from envs.tasks.reasoning import ReasoningTask, dataset_names
    from streamrl.errors import TaskError

    folder, names = sys.argv[1], sys.argv[3:] or dataset_names()
    pool = WorkerPool("envs.tasks.reasoning_worker", 1, STALL_S)  # one for all tasks
    with open(sys.argv[2], "w") as file:
        for name in names:
            try:
                task = ReasoningTask(name, answer_format="text")
                record = task.record("train", 0)
            except (TaskError, IndexError) as error:  # options are missing, or it holds too few questions
                found = {"refused": str(error)}
            else:
                task._pool = pool
                oracle = task._dataset.score_answer(record["answer"], task._entry(record["draw"]))
                scores = {text[:60]: task.reward(record, text).score for text in (*marks(folder), *STALLS)}
                found = {
                    "right": task.reward(record, record["answer"]).score, "package": float(oracle), "scores": scores,
                    "marks": sorted(os.listdir(folder)), "environment": os.environ.get(MARK),
                }  # fmt: skip
            print(json.dumps({"name": name} | found), file=file, flush=True)
    pool.close()


if __name__ == "__main__":
    main()
