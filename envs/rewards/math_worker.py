"""A process that compares mathematical answers: one JSON line in, one out. It may be ended at any moment.

Some expressions keep a computer algebra system busy without end; a process can be killed, a thread cannot. Nothing else
of the actor is in here: it starts in a second and can be replaced.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

from envs.rewards.math_equality import grade


def main() -> None:
    limit_s = int(sys.argv[1])
    logging.disable(logging.WARNING)  # math-verify says at each call that its own time limit is off: ours is in force
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a parser prints must not pass for an answer
    grade("1", "1")  # imports all it needs before it says that it is ready
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.alarm(limit_s + 1)  # for when the actor is gone and cannot end this process
        print(json.dumps(grade(gold, answer)), file=answers, flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
