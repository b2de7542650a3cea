"""Sandboxed programs per second, and how late a program that never ends is killed, at each level of this machine.

Run: python -m bench.sandbox [--quick] [--check]
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from bench.record import exit_status, record, shared_arguments
from envs.sandbox import Case, Limits, SandboxPool
from streamrl.errors import TaskError

KILL_GOAL_S = 0.5
RATE_GOAL = 50.0


def rate(pool: SandboxPool, num_programs: int, num_callers: int) -> float:
    """Programs per second, one sandbox each."""
    start = time.perf_counter()
    with ThreadPoolExecutor(num_callers) as callers:
        for execution in callers.map(lambda _: pool.run("print(1)")[0], range(num_programs)):
            assert execution.stdout == "1\n", execution
    return num_programs / (time.perf_counter() - start)


def case_rate(pool: SandboxPool, num_cases: int) -> float:
    """Cases per second of one program, as in a code reward."""
    start = time.perf_counter()
    executions = pool.run("print(input())", [Case(stdin="x")] * num_cases)
    assert [execution.status for execution in executions] == ["ok"] * num_cases
    return num_cases / (time.perf_counter() - start)


def overshoot(pool: SandboxPool) -> float:
    """Seconds beyond the limit until the call of an endless program returned."""
    pool.run("print(1)")
    start = time.perf_counter()
    (execution,) = pool.run("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass")
    assert execution.status == "timeout", execution
    return time.perf_counter() - start - pool.limits.timeout_s


def main() -> int:
    args = shared_arguments(__doc__ or "").parse_args()
    count = 40 if args.quick else 200
    results = []
    for level in ("1", "2"):
        try:
            pool = SandboxPool(level, num_workers=2, limits=Limits(timeout_s=1.0))
        except TaskError as error:
            print(f"level {level} left out: {error}", file=sys.stderr)
            continue
        with pool:
            rate(pool, 20, 4)
            rates = [rate(pool, count, 4) for _ in range(args.repeats)]
            cases = [case_rate(pool, count) for _ in range(args.repeats)]
            late = [overshoot(pool) for _ in range(args.repeats)]
        params = {"level": int(level), "num_workers": 2, "num_callers": 4, "num_programs": count}
        fast = {"id": "R13", "op": ">=", "value": RATE_GOAL}
        soon = {"id": "R13", "op": "<=", "value": KILL_GOAL_S}
        for name, value, unit, better, samples, goal in (
            ("programs", statistics.median(rates), "1/s", "higher", rates, fast),
            ("cases", statistics.median(cases), "1/s", "higher", cases, None),
            ("latest_kill", max(late), "s", "lower", late, soon),
        ):
            name = f"sandbox.{name}.level{level}"
            results.append(record(name, value, unit, better, samples, params, goal=goal, seed=args.seed))
    return exit_status(results, args.check)


if __name__ == "__main__":
    sys.exit(main())
