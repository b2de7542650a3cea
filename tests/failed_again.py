"""`python -m tests.failed_again EXIT_STATUS`: runs the few tests that failed beside others once more, alone.

Tests start real processes with real time limits, and a machine that others use as well makes one of some 12,000 late
now and then. Only a handful is given this second chance; what fails again, or fails in numbers, is a failure. What
passes is named in `build/failed_once.txt`, which continuous integration prints at its end: a test that is there often
is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
REPORT = Path("build/failed_once.txt")
MOST = 3
TESTS_FAILED = 1  # pytest's exit status; others (interrupted, internal error, usage) are no test's failure


def last_failed() -> set[str]:
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


def main(exit_status: int) -> int:
    failed = last_failed()
    if exit_status != TESTS_FAILED or not 1 <= len(failed) <= MOST:
        return exit_status
    print(f"\n{len(failed)} failed beside other tests, run once more, alone:", *sorted(failed), sep="\n  ", flush=True)
    code = int(pytest.main(["--last-failed", "--last-failed-no-failures=none"]))
    if passed := sorted(failed - last_failed()):
        report(passed)
    return code


def report(names: list[str]) -> None:
    print(f"\nfailed beside other tests and passed alone (also in {REPORT}):", *names, sep="\n  ", flush=True)
    REPORT.parent.mkdir(exist_ok=True)
    with REPORT.open("a") as file:
        file.writelines(f"{name}\n" for name in names)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
