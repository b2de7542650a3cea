"""A code verifier over HTTP, for actors that must not run programs: `python -m envs.rewards.verifier_server`.

    POST /check_correctness {in_outs, generation, timeout, debug}  ->  {result: [true, false, -1 ...], metadata: [...]}

A result for each test case in order: passed, wrong, an error or a time-out, no program. Listens on loopback unless told
otherwise; it has no authentication, so put it behind something that has before you open it to a network.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from aiohttp import web

from envs.data.shapes import code_tests
from envs.json_service import listening
from envs.rewards.code import grade_program
from envs.sandbox import Limits, SandboxPool
from streamrl.config.addresses import in_url
from streamrl.errors import TaskError

PATH = "/check_correctness"
MAX_BODY = 64 << 20
TOTAL_S = 600.0


def checking(pool: SandboxPool, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
    """The service, inside; gives its address, where port 0 takes a free one."""

    def check(request: web.Request, body: Any) -> tuple[int, dict[str, Any]]:
        try:
            if request.path != PATH:
                raise ValueError(f"no such path: {request.path}; POST to {PATH}")
            tests = code_tests({"test_cases": body["in_outs"]})
            results = grade_program(
                pool, str(body["generation"]), tests, partial=False, any_order=False, total_s=TOTAL_S,
                case_timeout_s=float(body.get("timeout") or pool.limits.timeout_s),
            )  # fmt: skip
        except (TaskError, ValueError, KeyError, TypeError) as error:
            return 400, {"error": str(error)}
        return 200, {"result": results, "metadata": [{}] * len(results)}

    return listening(partial(asyncio.to_thread, check), host.strip("[]"), port, max_bytes=MAX_BODY)


async def serve(pool: SandboxPool, host: str, port: int) -> None:
    async with checking(pool, host, port) as (host, port):
        print(f"code verifier at http://{in_url(host)}:{port}{PATH}, sandbox {pool.description}", flush=True)
        await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=None, help="programs at once; one for each core")
    parser.add_argument("--sandbox", choices=("auto", "1", "2"), default="auto", help="level, see docs/sandbox.md")
    args = parser.parse_args()
    try:
        pool = SandboxPool(args.sandbox, args.workers, Limits())
    except TaskError as error:
        print(error, file=sys.stderr)
        return 2
    with pool:
        try:
            asyncio.run(serve(pool, args.host, args.port))
        except KeyboardInterrupt:
            print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
