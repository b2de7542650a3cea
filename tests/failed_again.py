"""`python -m tests.failed_again EXIT_STATUS`: runs the few tests that failed beside others once more, alone.

Tests start real processes with real time limits, and a machine that others use as well makes one of some 11,000 late
now and then. Only a handful is given this second chance; what fails again, or fails in numbers, is a failure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 3
TESTS_FAILED = 1  # pytest's exit status; others (interrupted, internal error, usage) are no test's failure


def main(exit_status: int) -> int:
    failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
    if exit_status != TESTS_FAILED or not 1 <= len(failed) <= MOST:
        return exit_status
    print(f"\n{len(failed)} failed beside other tests, and run once more, alone:", *failed, sep="\n  ", flush=True)
    return int(pytest.main(["--last-failed", "--last-failed-no-failures=none"]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
