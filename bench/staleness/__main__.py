"""Does learning survive stale data, and which correction keeps it alive? See docs/staleness.md.

Run: python -m bench.staleness [--quick] [--resume] [--workers 2]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.staleness.parts import jobs
from bench.staleness.workers import run_all, work

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "staleness"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, one seed: checks that it runs")
    parser.add_argument("--resume", action="store_true", help="keep finished jobs of an interrupted run")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="where tables and charts go; docs/results/staleness by default")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, quick=arguments.quick)
        return 0
    kind = "quick" if arguments.quick else "full"
    folder = ROOT / "runs" / "staleness" / kind
    run_all(jobs(quick=arguments.quick), folder, num_workers=arguments.workers, quick=arguments.quick,
            resume=arguments.resume)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
