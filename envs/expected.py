"""The records' own answers, for a command that knows a run and not its task: `python -m envs.expected RUN`."""

from __future__ import annotations

import json
import sys
from typing import Any

from envs.registry import task_of
from streamrl.commands import status_of
from streamrl.environment import HasTarget, KnowsAnswer, Task


def known_answer(task: Task, split: str, number: int) -> Any:
    """The own answer of the record that a run calls by this number; None if it has none."""
    task = getattr(task, "base", task)  # of a task with tools around it
    record = task.record(split, number % task.num_records(split))
    if isinstance(task, KnowsAnswer):
        return task.answer(record)
    return task.target(record) if isinstance(task, HasTarget) else None


def main() -> int:
    """Read numbers of training records and write their answers, a JSON list each."""
    from streamrl.config.load import load_run_config  # its library is large, and samples do without

    out, sys.stdout = sys.stdout, sys.stderr  # code of the task may print
    task = task_of(load_run_config(sys.argv[1]))
    answers = (known_answer(task, "train", number) for number in json.load(sys.stdin))
    json.dump([None if one is None else str(one) for one in answers], out)
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
