"""Requests of all sorts against a server, many clients at once: does any of them harm it, or another?

`streamrl serve` with a tiny model is asked by several clients at once: requests drawn from the tables of all APIs, with
legal and illegal values mixed, and between them a fixed request at temperature 0, whose answer must stay the same. The
value is the number of answers that are a failure of the server (5xx) or another answer to the fixed request; beside it
the statuses, and the memory of the server at the start, after a quarter, and at the end.

Run: python -m bench.requests [--requests 20000] [--clients 16] [--quick]
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from bench.record import exit_status, record, shared_arguments
from envs.registry import task_of
from learner.model.tiny import prepare_tiny_model
from streamrl.config.load import load_config
from tests.fakes.drawn_requests import ROUTES, draw_body

CANARY = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0, "max_tokens": 12, "logprobs": True}
HEADERS = {"Content-Type": "application/json"}
EVERY = 10
"""Requests of a client between two of the fixed one."""


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    total = 400 if given.quick else given.requests
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (url, process):
        found = asyncio.run(drive(url, process, total, given.clients, given.seed))
    failures, memory = found["failures"], found["rss_mib"]
    for line in failures[:10]:
        print(line, file=sys.stderr)
    grown = memory[-1] / memory[1]
    results = [
        record(
            "requests.failures.serve", len(failures), "requests", "lower", [len(failures)],
            {"requests": total, "clients": given.clients, "statuses": found["statuses"], "canaries": found["canaries"]},
            goal={"id": "requests.failures", "op": "<=", "value": 0}, seed=given.seed,
        ),
        record(
            "requests.memory.serve", grown, "ratio", "lower", memory,
            {"requests": total, "clients": given.clients, "at": [0, total // 4, total]},
            goal={"id": "requests.memory", "op": "<=", "value": 1.1}, seed=given.seed,
        ),
    ]
    return exit_status(results, check=given.check)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The root URL of a served tiny model, and its process."""
    model = prepare_tiny_model(
        folder, task_of(load_config(["experiment=quickstart"])), hidden_size=32, num_layers=2, num_heads=2,
        num_warm_start_steps=0, warm_start_lr=1e-3, stop_at=0.5, seed=0, num_threads=1, progress=lambda *_: None,
        max_positions=1024,
    )
    command = [sys.executable, "-m", "streamrl.cli", "serve", str(model), "--port", "0", "experiment=quickstart",
               "actors.num_threads=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            line = next(line for line in one.stdout if line.startswith("serving "))
            yield line.split()[-1].removesuffix("/v1"), psutil.Process(one.pid)
            assert one.poll() is None, f"the server ended with status {one.poll()}"
        finally:
            one.terminate()


async def drive(url: str, process: psutil.Process, total: int, num_clients: int, seed: int) -> dict[str, Any]:
    """Ask `total` drawn requests with so many clients; the failures, the statuses and the memory of the server."""
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    left, canaries = iter(range(total)), 0
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, headers=HEADERS) as http:
        async def canary() -> str:
            answer = await http.post("/v1/chat/completions", json=CANARY)
            return str(answer.json()["choices"]) if answer.status_code == 200 else f"{answer.status_code} {answer.text}"

        truth = await canary()
        memory = [rss_mib(process)]

        async def client(name: int) -> None:
            nonlocal canaries
            random = Random(f"{seed} {name}")
            for number in left:
                path = random.choice(list(ROUTES))
                body = draw_body(random, ROUTES[path])
                answer = await http.post(path, content=body)
                statuses[answer.status_code] += 1
                if answer.status_code >= 500 or answer.status_code not in (200, 400, 413):
                    failures.append(f"{answer.status_code} {path} {body[:300]!r}: {answer.text[:300]}")
                if answer.status_code != 200 and "error" not in answer.json():
                    failures.append(f"{answer.status_code} without an error: {answer.text[:300]}")
                if number == total // 4:
                    memory.append(rss_mib(process))
                if number % EVERY == 0:
                    canaries += 1
                    if (again := await canary()) != truth:
                        failures.append(f"another answer: {again[:300]}, not {truth[:300]}")

        await asyncio.gather(*(client(number) for number in range(num_clients)))
    memory.append(rss_mib(process))
    counts = {str(status): count for status, count in sorted(statuses.items())}
    return {"failures": failures, "statuses": counts, "canaries": canaries, "rss_mib": memory}


def rss_mib(process: psutil.Process) -> float:
    return round(process.memory_info().rss / (1 << 20), 1)


if __name__ == "__main__":
    sys.exit(main())
