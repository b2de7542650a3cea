"""A comparison of corrections on stale data in the real system: which one still learns? See docs/results/staleness.

Run: python -m bench.staleness_real [--quick] [--out FOLDER] [--seeds N ...] [--max-cells N] [--jobs N]
                                      [--table] [--publish]
     python -m bench.staleness_real --arms vtrace impala --lags 24 --rates 3e-4 1e-3 --steps 60 --out FOLDER
     python -m bench.staleness_real --ages --out FOLDER
     python -m bench.staleness_real --precision --out FOLDER
     python -m bench.staleness_real --experiment smollm2 --arms uncorrected vtrace --lags 16 --rates 2e-5 --out FOLDER

Runs one cell after the other, or `--jobs` at once, and adds a line to FOLDER/results.jsonl for each; started again it
goes on where it was. The lag of a cell does not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from bench.staleness_real.cells import ARMS, CRITIC_ARMS, LAGS, NUM_STEPS, RATES, Cell, age_cells, all_cells, ordered
from bench.staleness_real.precision import precision_cells
from streamrl.errors import RunFailedError

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "results" / "staleness-real"
NUM_TRIES = 2
"""A cell whose lag was not the forced one, since a step was skipped, is run so often in all."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few short cells: checks that it runs")
    parser.add_argument("--out", type=Path, help="folder of the results; runs/staleness-real/full (or quick)")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="only the cells of these seeds")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *CRITIC_ARMS], help="only these, of both tables")
    parser.add_argument("--ages", action="store_true", help="nine rules at lags 0, 16, 64, 256 and two rates")
    parser.add_argument("--precision", action="store_true", help="float32 and int8 rollouts on SmolLM2")
    parser.add_argument("--lags", type=int, nargs="+", metavar="N", help="only these; with --arms any")
    parser.add_argument("--rates", type=float, nargs="+", metavar="R", help="only these; with --arms any")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of each run of --arms")
    parser.add_argument("--experiment", default="quickstart", help="of --arms, in an own folder, or a settings file")
    parser.add_argument("--max-cells", type=int, help="stop after so many")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each of about one core")
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    parser.add_argument("--publish", action="store_true", help="write the table, and replace the committed results")
    arguments = parser.parse_args(words)
    folder = arguments.out or ROOT / "runs" / "staleness-real" / ("quick" if arguments.quick else "full")
    folder = folder.resolve()
    if not (arguments.table or arguments.publish):
        cells = age_cells() if arguments.ages else precision_cells() if arguments.precision else all_cells(
            quick=arguments.quick, arms=arguments.arms, num_steps=arguments.steps, experiment=arguments.experiment,
            lags=arguments.lags or LAGS, rates=arguments.rates or RATES)
        cells = [one for one in cells if all(chosen is None or value in chosen for value, chosen in (
            (one.arm, arguments.arms), (one.seed, arguments.seeds), (one.lag, arguments.lags),
            (one.rate, arguments.rates)))]
        run_all(folder, cells, max_cells=arguments.max_cells, jobs=arguments.jobs)
    return write_table(folder, publish=arguments.publish)


def run_all(folder: Path, cells: Sequence[Cell], *, max_cells: int | None = None, jobs: int = 1) -> None:
    """Run every cell that has no valid line yet. Raises RunFailedError at the end, if runs failed."""
    from bench.environment import environment_stamp
    from bench.staleness_real.run_cell import append, finished, run_cell

    # One thread for each process.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.mkdir(parents=True, exist_ok=True)
    path, left = folder / "results.jsonl", max_cells if max_cells is not None else len(cells) * NUM_TRIES
    running: dict[Future[dict[str, Any]], Cell] = {}
    failed: dict[Cell, RunFailedError] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            begun = {*running.values(), *failed}
            waiting = [cell for cell in waiting_cells(cells, finished(path)) if cell not in begun]
            while waiting and left and len(running) < jobs:
                cell, left = waiting.pop(0), left - 1
                running[pool.submit(run_cell, cell, folder)] = cell
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(done)
                try:
                    result = done.result()
                except RunFailedError as error:
                    failed[cell] = error
                    print(error, flush=True)
                    continue
                result["valid"] = cell.lag_is_right(result)
                append({**result, "env": environment_stamp()}, path)
                print(f"{time.strftime('%H:%M:%S')} {cell.name}: end {result['end']:.3f}, area {result['area']:.3f}, "
                      f"lag {result['settled_lag']:.1f}{'' if result['valid'] else ' WRONG'}, "
                      f"{result['wall_s']:.0f} s; {len(waiting)} cells wait", flush=True)
    for error in failed.values():
        raise error


def waiting_cells(cells: Sequence[Cell], results: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Cells without a valid line that may be tried once more, in the order in which they are to be run."""
    tries: dict[Cell, int] = {}
    for one in results:
        cell = Cell(one["arm"], one["lag"], one["rate"], one["seed"], one["num_steps"],
                    one.get("experiment", "quickstart"), one.get("weights", "full"))
        tries[cell] = NUM_TRIES if one["valid"] else tries.get(cell, 0) + 1
    return ordered((one for one in cells if tries.get(one, 0) < NUM_TRIES), [one for one in results if one["valid"]])


def write_table(folder: Path, *, publish: bool) -> int:
    """The table of the valid cells, to the terminal and beside the results."""
    from bench.staleness_real.run_cell import finished
    from bench.staleness_real.tables import tables

    results = finished(folder / "results.jsonl")
    if not results:
        print(f"no results in {folder}", file=sys.stderr)
        return 1
    text = tables(results)
    print(text)
    if folder != COMMITTED:
        (folder / "tables.md").write_text(text)
    if publish:
        COMMITTED.mkdir(parents=True, exist_ok=True)
        (COMMITTED / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
