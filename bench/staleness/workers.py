"""Jobs on several processes of one thread each: a worker reads the name of a job, runs it, leaves JSON, says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.staleness.parts import Job, execute, jobs, plan_record

# One thread per process, and freed activations stay with the process: returning them costs a page fault per 4 KiB.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
}


def run_all(wanted: Sequence[Job], folder: Path, *, num_workers: int, quick: bool, resume: bool) -> None:
    """Leave `<job>.json` in `folder` for every job; with `resume`, files of the same plan are taken as they are.

    Raises:
        RuntimeError: a worker ended early; its own message is on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in wanted if not (resume and _is_done(job, folder))]
    queue, lock, began, count = list(waiting), threading.Lock(), time.perf_counter(), len(waiting)
    failures: list[str] = []

    def serve() -> None:
        command = [sys.executable, "-m", "bench.staleness", "--worker", str(folder), *(["--quick"] if quick else [])]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **_ENVIRONMENT}
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            while not failures:
                with lock:
                    if not queue:
                        break
                    job = queue.pop(0)
                process.stdin.write(job.name + "\n")
                process.stdin.flush()
                answer = process.stdout.readline().split()
                if not answer:
                    failures.append(job.name)
                    break
                with lock:
                    done = count - len(queue)
                    wall = time.perf_counter() - began
                    print(f"[{done:2d}/{count}] {job.name:28s} {float(answer[1]):6.1f} s CPU, {wall:6.0f} s so far",
                          flush=True)  # fmt: skip
            process.stdin.close()

    threads = [threading.Thread(target=serve) for _ in range(min(num_workers, max(1, count)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"the worker died in job {failures[0]}: see above; --resume keeps what is done")


def work(folder: Path, *, quick: bool) -> None:
    """The worker's side: job names on stdin, until it closes."""
    import torch

    torch.set_num_threads(1)
    known = {job.name: job for job in jobs(quick=quick)}
    for line in sys.stdin:
        result = execute(known[line.strip()])
        path = folder / f"{result['name']}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(path)  # a file that exists is whole
        print(result["name"], result["cpu_s"], flush=True)


def _is_done(job: Job, folder: Path) -> bool:
    path = folder / f"{job.name}.json"
    return path.exists() and json.loads(path.read_text())["plan"] == json.loads(json.dumps(plan_record(job)))
