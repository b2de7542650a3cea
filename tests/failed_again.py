"""`python -m tests.failed_again EXIT_STATUS`: runs the few tests that failed beside others once more, alone.

Tests start real processes with real time limits, and a machine that others use as well makes one of some 12,000 late
now and then. Only a handful is given this second chance; what fails again, or fails in numbers, is a failure. What
passes is named in `build/failed_once.txt` with what it had said, which continuous integration prints at its end: a test
that is there often is wrong. `-p tests.failed_again` keeps what a failed test says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from textwrap import indent

import pytest

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
REPORT, SAID = Path("build/failed_once.txt"), Path("build/failed.json")
MOST, MOST_CHARS = 3, 1500
"""Tests that are run again, and of what each said its first and its last characters: logs stand between them."""
TESTS_FAILED = 1  # pytest's exit status; others (interrupted, internal error, usage) are no test's failure


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    if not report.failed or crash is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    SAID.parent.mkdir(exist_ok=True)
    SAID.write_text(json.dumps({**said(), report.nodeid: shortened(crash.message)}))


def shortened(message: str) -> str:
    half = MOST_CHARS // 2
    return message if len(message) <= MOST_CHARS else f"{message[:half]}\n[...]\n{message[-half:]}"


def said() -> dict[str, str]:
    """The message of each test that failed, by its name."""
    return json.loads(SAID.read_text()) if SAID.exists() else {}


def last_failed() -> set[str]:
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


def main(exit_status: int) -> int:
    failed = last_failed()
    if exit_status != TESTS_FAILED or not 1 <= len(failed) <= MOST:
        return exit_status
    first = {name: said().get(name, "") for name in sorted(failed)}  # before they speak again
    print(f"\n{len(failed)} failed beside other tests, run once more, alone:\n{listed(first)}", flush=True)
    code = int(pytest.main(["--last-failed", "--last-failed-no-failures=none", "--continue-on-collection-errors"]))
    if passed := sorted(failed - last_failed()):
        report({name: first[name] for name in passed})
    return code


def report(found: dict[str, str]) -> None:
    print(f"\nfailed beside other tests and passed alone (also in {REPORT}):", *found, sep="\n  ", flush=True)
    REPORT.parent.mkdir(exist_ok=True)
    with REPORT.open("a") as file:
        file.write(listed(found))


def listed(found: dict[str, str]) -> str:
    return "".join(f"{name}\n{indent(message, '    ')}\n" for name, message in found.items())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
