"""A code verifier over HTTP, for actors that must not run programs: `python -m envs.rewards.verifier_server`.

    POST /check_correctness {in_outs, generation, timeout, debug}  ->  {result: [true, false, -1 ...], metadata: [...]}

A result for each test case in order: passed, wrong, an error or a time-out, no program. Listens on loopback unless told
otherwise; it has no authentication, so put it behind something that has before you open it to a network.
"""

from __future__ import annotations

import argparse
import socket
import sys
from http.server import ThreadingHTTPServer
from typing import Any

from envs.data.shapes import code_tests
from envs.json_handler import JsonHandler
from envs.rewards.code import grade_program
from envs.sandbox import Limits, SandboxPool
from streamrl.config.addresses import in_url
from streamrl.errors import TaskError

PATH = "/check_correctness"
MAX_BODY = 64 << 20
TOTAL_S = 600.0


def make_server(host: str, port: int, pool: SandboxPool) -> ThreadingHTTPServer:
    """A server that is bound but does not serve yet; port 0 takes a free one."""

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            try:
                self.answer(200, self._check())
            except (TaskError, ValueError, KeyError, TypeError) as error:
                self.answer(400, {"error": str(error)})

        def _check(self) -> dict[str, Any]:
            if self.path != PATH:
                raise ValueError(f"no such path: {self.path}; POST to {PATH}")
            request = self.request_json(MAX_BODY)
            tests = code_tests({"test_cases": request["in_outs"]})
            results = grade_program(
                pool, str(request["generation"]), tests, partial=False, any_order=False, total_s=TOTAL_S,
                case_timeout_s=float(request.get("timeout") or pool.limits.timeout_s),
            )  # fmt: skip
            return {"result": results, "metadata": [{}] * len(results)}

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server((host.strip("[]"), port), Handler)


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
    with pool, make_server(args.host, args.port, pool) as server:
        host, port = server.server_address[:2]
        print(f"code verifier at http://{in_url(str(host))}:{port}{PATH}, sandbox {pool.description}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
