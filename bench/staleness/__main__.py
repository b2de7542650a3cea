"""Does learning survive stale data, and which correction keeps it alive? See docs/results/staleness.

Run: python -m bench.staleness [--quick] [--resume] [--publish] [--workers 2]
     python -m bench.staleness --charts     prints the tables of the committed results and draws their charts again
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import environment_stamp
from bench.staleness.charts import write_charts
from bench.staleness.parts import LR, NUM_STEPS, Job, jobs
from bench.staleness.report import comparison, goal_lines, tables
from bench.staleness.summary import run_records
from bench.staleness.workers import run_all, work

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "results" / "staleness"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few updates, one seed: checks that it runs")
    parser.add_argument("--resume", action="store_true", help="keep the finished jobs of an interrupted run")
    parser.add_argument("--publish", action="store_true", help="replace the committed results by these")
    parser.add_argument("--charts", action="store_true", help="only print the committed tables and draw the charts")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="folder of the results; runs/staleness/full (or quick) by default")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.worker is not None:
        work(arguments.worker, quick=arguments.quick)
        return 0
    folder = arguments.out or ROOT / "runs" / "staleness" / ("quick" if arguments.quick else "full")
    wanted, began = jobs(quick=arguments.quick), time.perf_counter()
    if arguments.charts:
        results = json.loads((COMMITTED / "results.json").read_text())
        print(tables(results))
        write_charts(results["parts"], COMMITTED, eval_every=wanted[0].plan.eval_every)
        return 0
    run_all(wanted, folder / "jobs", num_workers=arguments.workers, quick=arguments.quick, resume=arguments.resume)
    results = collect(wanted, folder / "jobs", wall_s=time.perf_counter() - began, workers=arguments.workers,
                      resumed=arguments.resume)  # fmt: skip
    write(results, folder, eval_every=wanted[0].plan.eval_every)
    print("\n".join(goal_lines(results["parts"]["A"])))
    committed = COMMITTED / "results.json"
    if committed.exists() and not arguments.quick:
        print("\n".join(comparison(results["parts"], json.loads(committed.read_text())["parts"])))
    if arguments.publish:
        publish(folder)
    print(f"tables, charts and records: {os.path.relpath(folder)}")
    return 0


def collect(
    wanted: Sequence[Job], folder: Path, *, wall_s: float, workers: int, resumed: bool = False
) -> dict[str, Any]:
    """One document from the files of all jobs; of a resumed run `wall_s` is only the last part."""
    results = [json.loads((folder / f"{job.name}.json").read_text()) for job in wanted]
    first = next(result for result in results if result["part"] == "A")
    return {
        "schema": 1,
        "command": "python -m bench.staleness",
        "num_steps": first["plan"]["num_steps"],
        "full": first["plan"]["num_steps"] == NUM_STEPS,
        "lr": LR,
        "cpu_s": round(sum(result["cpu_s"] for result in results), 1),
        "wall_s": round(wall_s, 1),
        "workers": workers,
        "resumed": resumed,
        "task": first["plan"]["task"],
        "env": environment_stamp(),
        "parts": run_records(results),
    }


def write(results: dict[str, Any], folder: Path, *, eval_every: int) -> None:
    """results.json (a line per run), tables.md and the charts."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in results.items() if key != "parts"}
    parts = ",\n".join(
        f'"{part}": [\n' + ",\n".join(json.dumps(record) for record in records) + "\n]"
        for part, records in results["parts"].items()
    )
    (folder / "results.json").write_text(json.dumps(head)[:-1] + ',\n"parts": {\n' + parts + "\n}}\n")
    (folder / "tables.md").write_text(tables(results))
    write_charts(results["parts"], folder, eval_every=eval_every)


def publish(folder: Path) -> None:
    """Copy the records and charts that `write` made to the committed results, whose page is written by hand."""
    COMMITTED.mkdir(parents=True, exist_ok=True)
    for path in [folder / "results.json", *folder.glob("*.svg")]:
        shutil.copy(path, COMMITTED / path.name)


if __name__ == "__main__":
    sys.exit(main())
