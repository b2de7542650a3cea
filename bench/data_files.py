"""Opening a file of a million records, with the digest of every prompt, and reading records from it.

CPU seconds are the value: they say the same on a machine that is shared. Wall seconds stand in `params`.

Run: python -m bench.data_files [--quick] [--check]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.record import exit_status, record, shared_arguments
from envs.data.dataset import open_dataset
from streamrl.config.schema import DataConfig

NUM_READ = 10_000
OPEN_GOAL_S = 10.0
QUESTION = "Number {}: Natalia sold {} clips in April and {} more in May. How many clips did she sell altogether?"


def write_lines(path: Path, count: int, rng: random.Random) -> None:
    with path.open("w") as file:
        for index in range(count):
            a, b = rng.randint(0, 10**6), rng.randint(0, 10**6)
            one = {"question": QUESTION.format(index, a, b), "answer": str(a + b), "extra": {"id": index}}
            file.write(json.dumps(one) + "\n")


def write_parquet(path: Path, lines: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    cache = str(path.parent / "cache")
    datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=cache).to_parquet(str(path))


def opened(path: Path) -> tuple[float, float, float]:
    """CPU and wall seconds until the first record, and microseconds of CPU for each further one."""
    cpu, wall = time.process_time(), time.perf_counter()
    dataset = open_dataset(DataConfig(path=str(path)))
    dataset.train[len(dataset.train) // 2]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    start, rng = time.process_time(), random.Random(0)
    for _ in range(NUM_READ):
        dataset.train[rng.randrange(len(dataset.train))]
    return cpu, wall, (time.process_time() - start) / NUM_READ * 1e6


def main() -> int:
    args = shared_arguments(__doc__ or "").parse_args()
    count, results = 20_000 if args.quick else 1_000_000, []
    with tempfile.TemporaryDirectory() as folder:
        lines, table = Path(folder) / "train.jsonl", Path(folder) / "train.parquet"
        write_lines(lines, count, random.Random(args.seed))
        write_parquet(table, lines)
        for path in (lines, table):
            opened(path)  # a table is converted the first time
            cpu, wall, each = zip(*(opened(path) for _ in range(args.repeats)), strict=True)
            params = {"num_records": count, "num_bytes": path.stat().st_size, "wall_s": [round(one, 3) for one in wall]}
            goal = {"id": "million_records", "op": "<=", "value": OPEN_GOAL_S}
            kind = path.suffix.removeprefix(".")
            results.append(record(f"data.open_cpu.{kind}", statistics.median(cpu), "s", "lower", cpu, params, goal=goal,
                                  seed=args.seed))
            results.append(record(f"data.record_cpu.{kind}", statistics.median(each), "us", "lower", each, params,
                                  seed=args.seed))
    return exit_status(results, args.check)


if __name__ == "__main__":
    sys.exit(main())
