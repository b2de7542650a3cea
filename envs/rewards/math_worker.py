"""A process that compares mathematical answers: [gold, answer] in, a grade out.

Some expressions keep a computer algebra system busy without end; a process can be killed, a thread cannot.
"""

from __future__ import annotations

import logging
import sys

from envs.rewards.mathematics.equality import grade
from envs.sandbox.confined import serve


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify says at each call that its own time limit is off: ours is in force
    grade("1", "1")  # imports all it needs before it says that it is ready
    serve(lambda question: lambda: grade(*question), float(sys.argv[1]))


if __name__ == "__main__":
    main()
