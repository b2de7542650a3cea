"""`python -m tests.fakes.command_line WORDS`: the `streamrl` command; the program that it becomes runs in this process.

A fork server imports the libraries once then, for commands of every kind.
"""

import os
import runpy
import sys
from typing import NoReturn

from streamrl.cli import main
from tests.flow.forked_process import module_and_words


def become(_path: str, command: list[str]) -> NoReturn:
    """Run the module of `python -m MODULE WORDS`, as `os.execv` does in a new process."""
    program = module_and_words(command)
    assert program is not None, command
    sys.argv[1:] = program[1]
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    os.execv = become  # type: ignore[assignment]
    sys.exit(main())
